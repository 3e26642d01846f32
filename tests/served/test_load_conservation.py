"""What is reserved is released, whatever clients do, and it counts from the moment of the choice: field reports 5 to 7
and 13.
"""

import asyncio
import random
import signal
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.served.emulated_cluster import (
    MODEL,
    OUTCOMES,
    Process,
    Served,
    accounts,
    ask_all,
    client,
    end,
    largest_share,
    served,
    since,
    until,
    words,
)

__all__ = ["served"]
pytestmark = [pytest.mark.cluster, pytest.mark.model]

COMPLETIONS = "/v1/completions"
NUM_ABORTS = 1_000
ABORTS_AT_ONCE = 40
LONG_TOKENS = 32_000


def _completion(prompt: str | list[str], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}


def _chat(text: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **fields}


STAGES = ("before any answer", "without a stream", "queued or in prefill", "in decode")


async def _abort(http: httpx.AsyncClient, number: int, rng: random.Random) -> str:
    """Send a request and leave at a random moment of its stage; returns the stage, or how it ended before that."""
    stage, name = STAGES[number % len(STAGES)], f"abort {number}"
    try:
        match stage:
            case "before any answer":
                await _leave_after(http, _completion(words(name, 1_000), 400, stream=True), rng.uniform(0, 0.05))
            case "without a stream":
                await _leave_after(http, _completion(words(name, 1_000), 400), rng.uniform(0.05, 1.0))
            case "queued or in prefill":  # the head of the answer comes when the engine has the request
                async with http.stream("POST", COMPLETIONS, json=_completion(words(name, 6_000), 400, stream=True)):
                    await asyncio.sleep(rng.uniform(0, 0.4))
            case _:
                async with http.stream("POST", COMPLETIONS, json=_completion(name, 400, stream=True)) as stream:
                    chunks = stream.aiter_lines()
                    for _ in range(rng.randrange(2, 30)):
                        await anext(chunks)
    except (httpx.TransportError, StopAsyncIteration) as error:
        return f"{stage}: {error!r}"
    return stage


async def _leave_after(http: httpx.AsyncClient, body: dict[str, Any], seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await http.post(COMPLETIONS, json=body)


async def test_thousand_aborts_at_random_stages_leave_no_load(served: Served) -> None:
    before = accounts(served.state())
    slots, rng = asyncio.Semaphore(ABORTS_AT_ONCE), random.Random(13)

    async def one(http: httpx.AsyncClient, number: int) -> str:
        async with slots:
            return await _abort(http, number, rng)

    async with client(served) as http:
        left = Counter(await asyncio.gather(*(one(http, number) for number in range(NUM_ABORTS))))
    assert left == dict.fromkeys(STAGES, NUM_ABORTS // len(STAGES))
    await asyncio.to_thread(served.wait_until_idle)
    ended = since(before, served.state())
    assert ended["decisions"] == sum(ended[outcome] for outcome in (*OUTCOMES, "orphans")), ended
    assert ended["aborted"] >= 0.45 * NUM_ABORTS, ended  # of the last two stages nearly all


ENDPOINTS = [
    pytest.param("/v1/chat/completions", _chat("hello", 150), id="chat"),
    pytest.param("/v1/chat/completions", _chat("hello", 150, stream=True), id="streamed chat"),
    pytest.param(COMPLETIONS, _completion("hello", 150), id="completion"),
    pytest.param(COMPLETIONS, _completion("hello", 150, stream=True), id="streamed completion"),
    pytest.param(COMPLETIONS, _completion(["a", "b", "c"], 150), id="batch"),
    pytest.param(COMPLETIONS, _completion(["a", "b", "c"], 150, stream=True), id="streamed batch"),
    pytest.param(COMPLETIONS, _completion("hello", 150, n=2), id="two answers"),
]


def _open(served: Served) -> list[int]:
    """Open requests, as each ingress sees them."""
    return [sum(replica["num_open"] for replica in one["replicas"]) for one in served.state()["ingresses"]]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_each_endpoint_is_one_request_on_every_ingress_and_then_none(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    before = accounts(served.state())
    async with client(served) as http:
        asking = asyncio.create_task(http.post(path, json=body))
        await asyncio.to_thread(until, lambda: _open(served) == [1, 1], 10, lambda: f"counted once: {_open(served)}")
        assert (await asking).status_code == 200
    await asyncio.to_thread(until, lambda: not served.left_open(), 10, lambda: f"left: {served.left_open()}")
    ended = since(before, served.state())
    assert (ended["decisions"], ended["finished"]) == (1, 1), ended


@pytest.mark.parametrize("body", [{"model": MODEL, "prompt": 7}, _completion("x", -1), _completion("x" * 400_000, 1)])
async def test_refused_request_is_released_as_refused(served: Served, body: dict[str, Any]) -> None:
    before = accounts(served.state())
    async with client(served) as http:
        answer = await http.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    await asyncio.to_thread(until, lambda: not served.left_open(), 10, lambda: f"left: {served.left_open()}")
    until(lambda: since(before, served.state())["rejected"] == 1, 10, lambda: f"{since(before, served.state())}")


async def test_long_prompts_of_one_output_token_count_from_the_choice_on(served: Served) -> None:
    async with client(served) as http:
        answers = await ask_all(http, (words(f"long {number}", LONG_TOKENS) for number in range(8)), max_tokens=1)
    for answer in answers:
        answer.check(1)
        assert answer.is_complete, answer
        assert len(answer.prompt_token_ids) >= LONG_TOKENS
    assert largest_share(answers) <= 1.3
    await asyncio.to_thread(served.wait_until_idle)


def _figures(served: Served, replica_id: str) -> list[tuple[float, int]]:
    """Load in seconds and index in blocks of a replica, as each ingress sees them."""
    seen = [one["replicas"] for one in served.state()["ingresses"]]
    return [
        (one["load_s"], one["index_blocks"]) for replicas in seen for one in replicas if one["replica_id"] == replica_id
    ]


def _smaller_index_first(served: Served) -> list[Process]:
    return sorted(served.both_replicas(), key=lambda replica: _figures(served, replica.replica_id)[0][1])


async def test_misses_go_to_the_idle_replica_although_the_busy_one_has_the_smaller_index(served: Served) -> None:
    async with client(served) as http:
        await ask_all(http, (words(f"index {number}", 500) for number in range(5)), max_tokens=1)
        small, big = _smaller_index_first(served)
        engine_pid = small.engine_pid
        end(engine_pid, signal.SIGSTOP)
        try:
            stuck = asyncio.create_task(ask_all(http, (words(f"slow {n}", 8_000) for n in range(8)), max_tokens=1))
            await asyncio.to_thread(until, lambda: _is_only_busy(served, small, big), 30, "only one is busy")
            answers = [(await ask_all(http, [words(f"miss {n}", 300)], max_tokens=1))[0] for n in range(10)]
        finally:
            end(engine_pid, signal.SIGCONT)
        assert all(answer.is_complete for answer in await stuck)
    assert [answer.replica_id for answer in answers] == [big.replica_id] * 10
    await asyncio.to_thread(served.wait_until_idle)


def _is_only_busy(served: Served, small: Process, big: Process) -> bool:
    smalls, bigs = _figures(served, small.replica_id), _figures(served, big.replica_id)
    has_load = all(load_s > 1.0 for load_s, _ in smalls) and all(load_s == 0.0 for load_s, _ in bigs)
    return has_load and all(one[1] < other[1] for one, other in zip(smalls, bigs, strict=True))
