"""The client of the emulated comparison, against a real server on loopback that misbehaves as asked."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import router_emulated_label
from aiohttp import web
from router_emulated_load import PATH, StreamError, Timed, prompt_text, read_chunk, replay, timed

from serve_app.local_ray import LOOPBACK
from serve_app.sim.arrivals import GspParams, gsp

WORDS = ["one", "two", "three"]
TOKEN = {"choices": [{"text": " word"}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


ANSWERS = {
    "good": _event(TOKEN) + _event(TOKEN) + _event(USAGE) + b"data: [DONE]\n\n",
    "no usage": _event(TOKEN) + b"data: [DONE]\n\n",
    "no token": _event(USAGE) + b"data: [DONE]\n\n",
    "error": _event(TOKEN) + _event({"error": {"message": "the engine died"}}),
}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server that answers each prompt with what `ANSWERS` has for it, 429 for "busy", and "silence" never."""

    async def complete(request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        if prompt == "busy":
            return web.Response(status=429, text="come back later")
        response = web.StreamResponse(headers={router_emulated_label.HEADER: "engine-1"})
        await response.prepare(request)
        if prompt == "silence":
            await asyncio.Event().wait()
        await response.write(ANSWERS[prompt])
        return response

    app = web.Application()
    app.router.add_post(PATH, complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, 0)
    await site.start()
    yield site.name
    await runner.cleanup()


async def test_complete_answers_have_their_figures_and_broken_ones_their_reason(url: str) -> None:
    prompts = ["good", "busy", "no usage", "no token", "error", "silence"]

    good, busy, *broken, silence = await replay(url, [_timed(0.0, prompt) for prompt in prompts], 0.5)

    assert (good.error, good.replica) == ("", "engine-1")
    assert (good.prompt_tokens, good.cached_tokens, good.output_tokens) == (7, 2, 4)
    assert 0.0 < good.ttft_s <= good.latency_s
    assert busy.error == "StreamError: status 429: come back later"
    assert ["without a token" in one.error for one in broken] == [True, True, False]
    assert "the engine died" in broken[-1].error
    assert silence.error == "unanswered at the end of the run"


async def test_requests_are_sent_at_their_times_whatever_became_of_others(url: str) -> None:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    answers = await replay(url, [_timed(0.0, "silence"), _timed(0.3, "good")], 0.2)

    assert [answer.at_s for answer in answers] == [0.0, 0.3]
    assert all(answer.late_s >= 0.0 for answer in answers)
    assert answers[1].error == ""
    assert loop.time() - begun_s >= 0.3


async def test_server_that_is_not_there_is_an_error_of_each_request() -> None:
    (answer,) = await replay(f"http://{LOOPBACK}:9", [_timed(0.0, "good")], 5.0)

    assert "Connect" in answer.error


def test_text_has_one_word_for_each_token_and_equal_ids_give_equal_text() -> None:
    assert prompt_text([0, 4, 2, 3], WORDS) == " one two three one"


def test_workload_becomes_requests_at_stretched_times_with_its_own_lengths() -> None:
    arrivals = gsp(GspParams(num_groups=2, prompts_per_group=2, prompt_tokens=(8, 16)), np.random.default_rng(0))

    requests = timed(arrivals, WORDS, 3.0)

    assert [one.at_s for one in requests] == [3 * one.at_s for one in arrivals]
    assert sorted(one.prompt_tokens for one in requests) == [8, 8, 16, 16]
    for one in requests:
        body = json.loads(one.body)
        assert len(body["prompt"].split()) == one.prompt_tokens
        assert (body["max_tokens"], body["stream"], body["stream_options"]) == (4, True, {"include_usage": True})


@pytest.mark.parametrize("line", [b"\n", b": a comment\n", b"data: [DONE]\n", b"event: message\n"])
def test_lines_without_a_chunk_are_passed_over(line: bytes) -> None:
    assert read_chunk(line) is None


@pytest.mark.parametrize("data", [b"oops", b"[1]", b"{}", b'{"choices": 1}', b'{"error": {"message": "no"}}'])
def test_lines_with_something_else_are_errors(data: bytes) -> None:
    with pytest.raises(StreamError, match="the stream said"):
        read_chunk(b"data: " + data + b"\n")


async def test_middleware_names_the_engine_by_its_port() -> None:
    sent: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    await router_emulated_label.EngineName(inner)({"type": "http", "server": (LOOPBACK, 8123)}, receive, send)

    assert sent[0]["headers"] == [(b"x-fairway-replica", b"engine-8123")]


def _timed(at_s: float, prompt: str) -> Timed:
    return Timed(at_s, 7, json.dumps({"prompt": prompt}).encode())
