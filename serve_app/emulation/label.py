"""ASGI middleware that labels what an emulated engine serves: every model card and every response.

Chosen by vLLM's own argument, in `vllm serve` as under Ray with direct streaming:

    middleware=["serve_app.emulation.label.EmulatedLabel"]

`GET /v1/models` and `GET /v1/models/ID` get `"emulated": true` in each card, every response `x-fairway-emulated: true`.
"""

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-fairway-emulated"
MODELS_PATH = "/v1/models"


class EmulatedLabel:
    """Pure ASGI, so that a stream passes chunk by chunk."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "GET" and MODELS_PATH in scope["path"]:
            await self._app(scope, receive, _Cards(_with_header(send)))
        else:
            await self._app(scope, receive, _with_header(send))


def _with_header(send: Send) -> Send:
    async def labelled(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[HEADER] = "true"
        await send(message)

    return labelled


class _Cards:
    """`send` that holds a short answer back until it is complete, then labels its cards and corrects its length."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = labelled_cards(self._body)
        MutableHeaders(scope=self._start)["content-length"] = str(len(body))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})


def labelled_cards(body: bytes) -> bytes:
    """A list of models or one model, as JSON, with each card labelled; anything else as it is."""
    try:
        answer = json.loads(body)
    except ValueError:
        return body
    cards = _cards(answer)
    for card in cards:
        card["emulated"] = True
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() if cards else body


def _cards(answer: Any) -> list[dict[str, Any]]:
    if not isinstance(answer, dict):
        return []
    listed = answer.get("data") if answer.get("object") == "list" else [answer]
    return [card for card in listed or () if isinstance(card, dict) and card.get("object") == "model"]
