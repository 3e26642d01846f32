"""ASGI middleware of a replica: opens a trace for each routed request, answers with the routing headers, closes once.

Trusted headers come from the ingress by way of HAProxy, which strips a client's own values of that prefix. A request
without them (GET, or the fallback proxy) passes untouched.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.deployments.event_forwarder import EventForwarder
from serve_app.deployments.request_trace import CURRENT, RequestTrace
from serve_app.router.lifecycle import Closed, FirstToken, Opened, Outcome

TRUSTED_PREFIX = "x-serve-router-"
ID_HEADER = f"{TRUSTED_PREFIX}fairway-id"
PREDICTED_HEADER = f"{TRUSTED_PREFIX}fairway-predicted-ms"
HIT_HEADER = f"{TRUSTED_PREFIX}fairway-hit-tokens"
SERVICE_HEADER = f"{TRUSTED_PREFIX}fairway-service-ms"
NOTE_HEADER = f"{TRUSTED_PREFIX}fairway-note"

GetForwarder = Callable[[], EventForwarder]


class FairwayMiddleware:
    """Pure ASGI, so that a stream passes chunk by chunk."""

    def __init__(self, app: ASGIApp, replica_id: str, forwarder: EventForwarder) -> None:
        self._app = app
        self._replica_id = replica_id
        self._forwarder = forwarder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        if headers is None or ID_HEADER not in headers:
            await self._app(scope, receive, send)
            return
        trace = RequestTrace(headers[ID_HEADER], time.monotonic(), self._first_token)
        self._forwarder.report(Opened(trace.request_id, _float(headers.get(SERVICE_HEADER)) / 1e3))
        response = _Response(send, self._response_headers(headers))
        token = CURRENT.set(trace)
        outcome: Outcome | None = None
        try:
            await self._app(scope, receive, response)
        except asyncio.CancelledError:
            outcome = "aborted"
            raise
        except BaseException:
            outcome = "failed"
            raise
        finally:
            CURRENT.reset(token)
            self._close(trace, response, outcome)

    def _first_token(self, trace: RequestTrace) -> None:
        assert trace.ttft_s is not None
        self._forwarder.report(FirstToken(trace.request_id, trace.ttft_s, trace.cached_tokens, trace.prompt_tokens))

    def _close(self, trace: RequestTrace, response: "_Response", outcome: Outcome | None) -> None:
        self._forwarder.report(
            Closed(
                request_id=trace.request_id,
                status=response.status,
                outcome=outcome or response.outcome,
                e2e_s=time.monotonic() - trace.started_s,
                ttft_s=trace.ttft_s,
                prompt_tokens=trace.prompt_tokens,
                cached_tokens=trace.cached_tokens,
                output_tokens=trace.output_tokens,
            )
        )

    def _response_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        pairs = {
            "x-fairway-request-id": headers[ID_HEADER],
            "x-fairway-replica": self._replica_id,
            "x-fairway-predicted-ms": headers.get(PREDICTED_HEADER, ""),
            "x-fairway-hit-tokens": headers.get(HIT_HEADER, ""),
            "x-fairway-note": headers.get(NOTE_HEADER, ""),
        }
        return [(name.encode(), value.encode("latin-1")) for name, value in pairs.items() if value]


class _Response:
    """`send` that adds headers to the start and remembers how the answer ended."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.status = 0
        self.complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        await self._send(message)

    @property
    def outcome(self) -> Outcome:
        if not self.complete:
            return "aborted"
        if self.status >= 500:
            return "failed"
        return "rejected" if self.status >= 400 else "finished"


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0
