"""Two ingresses route the same replicas: each hears of the other's requests, and neither waits for a hung one."""

import asyncio
import signal
import time
from statistics import median

import httpx
import pytest

from tests.served.emulated_cluster import (
    MODEL,
    Served,
    ask,
    ask_all,
    client,
    end,
    largest_share,
    served,
    until,
    words,
)

__all__ = ["served"]
pytestmark = [pytest.mark.cluster, pytest.mark.model]

BURST = 48
STALE_S = 1.0
"""Bound of the time from one ingress' reservation to the other's knowing of it, on a machine that is not overloaded."""


async def test_burst_of_equal_cold_prompts_spreads_over_the_replicas(served: Served) -> None:
    before = [one["totals"]["decisions"] for one in served.state()["ingresses"]]
    async with client(served) as http:
        answers = await ask_all(http, (words(f"burst {number}", 1_000) for number in range(BURST)), max_tokens=4)
    for answer in answers:
        answer.check(4)
        assert answer.is_complete, answer
    decided = [one["totals"]["decisions"] - was for one, was in zip(served.state()["ingresses"], before, strict=True)]
    assert min(decided) >= BURST // 4, f"both ingresses must have routed the burst: {decided}"
    assert largest_share(answers) <= 1.3
    await asyncio.to_thread(served.wait_until_idle)


async def test_reservation_is_known_to_the_other_ingress_soon(served: Served) -> None:
    stale_s = []
    async with client(served) as http:
        for number in range(4):
            stale_s.append(await _staleness_s(served, http, number))
    print(f"reservation known to the other ingress after {median(stale_s):.3f} s (median of {sorted(stale_s)})")
    assert median(stale_s) < STALE_S
    await asyncio.to_thread(served.wait_until_idle)


async def _staleness_s(served: Served, http: httpx.AsyncClient, number: int) -> float:
    """Seconds between the first and the last ingress that has a request open; what one look at both takes is in it."""
    asking = asyncio.create_task(ask(http, words(f"seen {number}", 100), max_tokens=200))
    await asyncio.to_thread(until, lambda: any(_open(served)), 10, "one ingress has it open")
    first_s = time.monotonic()
    await asyncio.to_thread(until, lambda: all(_open(served)), 10, "both ingresses have it open")
    stale_s = time.monotonic() - first_s
    assert (await asking).is_complete
    await asyncio.to_thread(until, lambda: not any(_open(served)), 10, "no ingress has it open")
    return stale_s


def _open(served: Served) -> list[int]:
    return [sum(replica["num_open"] for replica in one["replicas"]) for one in served.state()["ingresses"]]


async def test_hung_ingress_delays_requests_by_its_timeout_and_loses_none(served: Served) -> None:
    hung = served.ingresses()[0]
    async with client(served) as http:
        end(hung.pid, signal.SIGSTOP)
        try:
            answers = await ask_all(http, (words(f"one ingress {number}", 200) for number in range(8)), max_tokens=4)
        finally:
            end(hung.pid, signal.SIGCONT)
    for answer in answers:
        answer.check(4)
        assert answer.is_complete, answer
        assert answer.took_s < 20, answer
    await asyncio.to_thread(served.wait_until_idle)


async def test_killed_ingress_takes_no_reservation_with_it_and_its_successor_knows_the_open_requests(
    served: Served,
) -> None:
    lost = served.ingresses()[0]
    endless = {"model": MODEL, "prompt": "go on", "max_tokens": 30_000, "ignore_eos": True}
    async with client(served) as http:
        asking = [asyncio.create_task(http.post("/v1/completions", json=endless, timeout=600)) for _ in range(2)]
        await asyncio.to_thread(until, lambda: _open(served) == [2, 2], 20, lambda: f"all open: {_open(served)}")
        end(lost.pid, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: _knows(served, lost.replica_id, 2), 150, "a successor that knows them")
        assert not any(one.done() for one in asking)
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)
    await asyncio.to_thread(served.wait_until_idle)


def _knows(served: Served, lost: str, num_open: int) -> bool:
    ingresses = served.state()["ingresses"]
    if len(ingresses) != 2 or lost in [one["ingress"] for one in ingresses]:
        return False
    return _open(served) == [num_open, num_open]
