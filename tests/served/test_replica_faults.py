"""A replica is killed, hung, slowed and restarted under load: nobody waits for ever, nothing is sent twice, nothing is
left behind.
"""

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator

import pytest

from tests.served.emulated_cluster import (
    Answer,
    Process,
    Served,
    client,
    end,
    more_answers,
    served,
    share_of,
    traffic,
    until,
    words,
)

__all__ = ["served"]
pytestmark = [pytest.mark.cluster, pytest.mark.model]

NUM_USERS = 6
NUM_FAMILIES = 12
OUTPUT_TOKENS = 20
ENDED_WITHIN_S = 40.0
"""Longest that any request may take on a busy machine; alone it takes a fifth of a second."""
DEPARTED_WITHIN_S = 40.0


def _questions(name: str) -> Iterator[str]:
    """Prompts of a few long prefixes in turn, each with a question of its own."""
    return (f"{words(f'{name} {n % NUM_FAMILIES}', 400)} question {n}" for n in itertools.count())


def _strangers(name: str) -> Iterator[str]:
    """Prompts that share nothing."""
    return (words(f"{name} {n}", 400) for n in itertools.count())


def _check(answers: list[Answer], victim: Process) -> list[Answer]:
    """Every answer whole, or broken by the victim with a clear error, in time; returns the broken ones."""
    for answer in answers:
        answer.check(OUTPUT_TOKENS)
        assert answer.took_s < ENDED_WITHIN_S, answer
    broken = [answer for answer in answers if not answer.is_complete]
    assert all(answer.replica_id in ("", victim.replica_id) for answer in broken), broken
    return broken


def _is_forgotten(served: Served, replica_id: str) -> bool:
    return not any(replica_id in seen for seen in served.seen_replicas())


async def test_killed_replica_breaks_only_its_own_streams_and_returns_without_a_herd(served: Served) -> None:
    victim, other = served.both_replicas()
    async with client(served) as http, traffic(http, _questions("kill"), OUTPUT_TOKENS, NUM_USERS) as answers:
        await more_answers(answers, 40)
        end(victim.pid, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: _is_forgotten(served, victim.replica_id), DEPARTED_WITHIN_S, "departure")
        await asyncio.to_thread(served.both_replicas, victim.replica_id)
        back_s = time.monotonic()
        await more_answers(answers, 60)
    assert len(_check(answers, victim)) <= NUM_USERS
    known = [answer for answer in answers if answer.began_s > back_s and answer.is_complete]
    cold_share = 1 - share_of(other.replica_id, known)
    # Half would be as if nobody had any prefix.
    assert cold_share < 0.5, f"{cold_share:.2f} of {len(known)} known prefixes went to the cold replica"
    print(f"{len(known)} requests of known prefixes after the restart, {cold_share:.2f} of them to the cold replica")
    served.wait_until_idle()


async def test_hung_engine_delays_its_requests_and_loses_none(served: Served) -> None:
    victim, _ = served.both_replicas()
    async with client(served) as http, traffic(http, _strangers("hang"), OUTPUT_TOKENS, NUM_USERS) as answers:
        await more_answers(answers, 20)
        engine_pid = victim.engine_pid
        end(engine_pid, signal.SIGSTOP)
        try:
            hung_s = time.monotonic()
            await more_answers(answers, 20)  # the other replica's: users of the hung one wait
            waited_s = time.monotonic() - hung_s
        finally:
            end(engine_pid, signal.SIGCONT)
        await more_answers(answers, 20)
    assert not _check(answers, victim)
    assert max(answer.took_s for answer in answers) >= 0.5 * waited_s
    served.wait_until_idle()


async def test_engine_killed_while_it_hangs_is_an_error_to_its_requests_and_its_replica_is_replaced(
    served: Served,
) -> None:
    victim, _ = served.both_replicas()
    async with client(served) as http, traffic(http, _strangers("die"), OUTPUT_TOKENS, NUM_USERS) as answers:
        await more_answers(answers, 20)
        engine_pid = victim.engine_pid
        end(engine_pid, signal.SIGSTOP)
        await more_answers(answers, 10)
        end(engine_pid, signal.SIGKILL)
        killed_s = time.monotonic()
        gone_s = await asyncio.to_thread(
            until, lambda: _is_forgotten(served, victim.replica_id), DEPARTED_WITHIN_S, "departure"
        )
        print(f"{gone_s:.1f} s after its engine died the replica was gone from every ingress")
        await more_answers(answers, 20)
    broken = _check(answers, victim)
    assert broken
    late = [answer for answer in broken if answer.began_s > killed_s + 10]
    assert not late, "a dead engine went on drawing requests"
    until(lambda: not served.left_open(), 10, lambda: f"left before another stands in: {served.left_open()}")
    served.both_replicas(other_than=victim.replica_id)
    served.wait_until_idle()


async def test_slowed_replica_gets_less_and_everybody_is_served(served: Served) -> None:
    victim, _ = served.both_replicas()
    async with client(served) as http, traffic(http, _strangers("slow"), OUTPUT_TOKENS, NUM_USERS) as answers:
        await more_answers(answers, 10)
        slow_s = time.monotonic()
        throttle = asyncio.create_task(_throttle(victim.engine_pid))
        await more_answers(answers, 60)
        throttle.cancel()
        await asyncio.wait({throttle})
    assert not _check(answers, victim)
    during = [answer for answer in answers if answer.began_s > slow_s]
    assert share_of(victim.replica_id, during) < 0.5
    served.wait_until_idle()


async def _throttle(engine_pid: int) -> None:
    """Stop the engine for nine tenths of the time, as a GPU that is hot."""
    try:
        while True:
            end(engine_pid, signal.SIGSTOP)
            await asyncio.sleep(0.18)
            end(engine_pid, signal.SIGCONT)
            await asyncio.sleep(0.02)
    finally:
        end(engine_pid, signal.SIGCONT)
