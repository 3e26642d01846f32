"""The replica's middleware: one Opened and one Closed a routed request, whatever happens between."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.deployments import middleware
from serve_app.deployments.event_forwarder import EventForwarder
from serve_app.deployments.request_trace import CURRENT, RequestTrace, traced_generate
from serve_app.router.lifecycle import Closed, FirstToken, LifecycleBatch, Opened

TRUSTED = [
    (middleware.ID_HEADER.encode(), b"id-1"),
    (middleware.PREDICTED_HEADER.encode(), b"12.5"),
    (middleware.HIT_HEADER.encode(), b"64"),
    (middleware.SERVICE_HEADER.encode(), b"250"),
]


async def _never_sent(batch: LifecycleBatch) -> None:
    raise AssertionError("nothing is sent in these tests")


@pytest.fixture
def forwarder() -> EventForwarder:
    return EventForwarder("replica-1", _never_sent)


async def _receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _run(app: ASGIApp, forwarder: EventForwarder, headers: list[tuple[bytes, bytes]]) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "headers": headers}
    await middleware.FairwayMiddleware(app, "replica-1", forwarder)(scope, _receive, send)
    return sent


def _answering(status: int, body: Callable[[], Awaitable[None]] | None = None) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        if body is not None:
            await body()
        await send({"type": "http.response.body", "body": b"x", "more_body": False})

    return app


def _closed(forwarder: EventForwarder) -> Closed:
    events = forwarder._waiting
    assert isinstance(events[0], Opened)
    assert isinstance(events[-1], Closed)
    assert sum(isinstance(event, Closed) for event in events) == 1
    assert forwarder.open_ids == frozenset()
    return events[-1]


async def test_answer_carries_replica_prediction_and_hits(forwarder: EventForwarder) -> None:
    start, _ = await _run(_answering(200), forwarder, TRUSTED)
    assert dict(start["headers"]) == {
        b"x-fairway-replica": b"replica-1",
        b"x-fairway-predicted-ms": b"12.5",
        b"x-fairway-hit-tokens": b"64",
        b"x-fairway-request-id": b"id-1",
    }


async def test_note_on_a_wish_reaches_the_client(forwarder: EventForwarder) -> None:
    start, _ = await _run(_answering(200), forwarder, [*TRUSTED, (middleware.NOTE_HEADER.encode(), b"ignored: why")])
    assert dict(start["headers"])[b"x-fairway-note"] == b"ignored: why"


@pytest.mark.parametrize(
    ("status", "outcome"), [(200, "finished"), (400, "rejected"), (404, "rejected"), (500, "failed")]
)
async def test_every_status_closes_once_with_its_outcome(forwarder: EventForwarder, status: int, outcome: str) -> None:
    await _run(_answering(status), forwarder, TRUSTED)
    closed = _closed(forwarder)
    assert (closed.request_id, closed.status, closed.outcome) == ("id-1", status, outcome)


async def test_opened_tells_the_reserved_seconds(forwarder: EventForwarder) -> None:
    await _run(_answering(200), forwarder, TRUSTED)
    assert forwarder._waiting[0] == Opened("id-1", 0.25)


async def test_client_disconnect_closes_as_aborted(forwarder: EventForwarder) -> None:
    task = asyncio.ensure_future(_run(_answering(200, lambda: asyncio.sleep(60)), forwarder, TRUSTED))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _closed(forwarder).outcome == "aborted"


async def test_error_inside_the_engine_closes_as_failed_and_is_raised(forwarder: EventForwarder) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        await _run(app, forwarder, TRUSTED)
    assert _closed(forwarder).outcome == "failed"


async def test_stream_that_stops_short_is_no_finish(forwarder: EventForwarder) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    await _run(app, forwarder, TRUSTED)
    assert _closed(forwarder).outcome == "aborted"


async def test_request_without_trusted_id_passes_untouched(forwarder: EventForwarder) -> None:
    start, _ = await _run(_answering(200), forwarder, [])
    assert start["headers"] == []
    assert forwarder._waiting == []


def _output(tokens: int, prompt_tokens: int = 10, cached: int = 4) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=[1] * tokens)],
        prompt_token_ids=[0] * prompt_tokens,
        num_cached_tokens=cached,
    )


async def _engine(outputs: list[Any]) -> Any:
    for output in outputs:
        yield output


async def test_batch_of_prompts_has_one_first_token_when_all_have_one(forwarder: EventForwarder) -> None:
    generate = traced_generate(_engine)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        streams = [generate([_output(0), _output(1), _output(2)]) for _ in range(4)]
        for stream in streams:
            async for _ in stream:
                pass
        await _answering(200)(scope, receive, send)

    await _run(app, forwarder, TRUSTED)
    firsts = [event for event in forwarder._waiting if isinstance(event, FirstToken)]
    assert [(first.prompt_tokens, first.cached_tokens) for first in firsts] == [(40, 16)]
    closed = _closed(forwarder)
    assert (closed.prompt_tokens, closed.cached_tokens, closed.output_tokens) == (40, 16, 12)
    assert closed.ttft_s is not None


async def test_request_cut_before_its_first_token_reports_none(forwarder: EventForwarder) -> None:
    await _run(_answering(400), forwarder, TRUSTED)
    assert _closed(forwarder).ttft_s is None
    assert not any(isinstance(event, FirstToken) for event in forwarder._waiting)


async def test_untraced_generate_is_the_engine_s_own_stream() -> None:
    assert CURRENT.get() is None
    seen = [output async for output in traced_generate(_engine)([1, 2])]
    assert seen == [1, 2]


async def test_trace_follows_a_generator_driven_by_another_task() -> None:
    trace = RequestTrace("id", 0.0, lambda trace: None)
    token = CURRENT.set(trace)
    stream = traced_generate(_engine)([_output(1)])
    CURRENT.reset(token)

    async def drain() -> None:
        async for _ in stream:
            pass

    await asyncio.create_task(drain())
    assert trace.output_tokens == 1
