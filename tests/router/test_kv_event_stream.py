"""What happens to a feed when its engine restarts, is not there, or floods it; real publishers on loopback."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch

from serve_app.router.kv_event_batch import RemovedEvent, StoredEvent, open_batch, slices
from serve_app.router.kv_event_stream import SLICE_BLOCKS
from serve_app.router.kv_events import BLOCKS_A_TURN, FeedState, KvEventSubscriber
from serve_app.router.loop_share import LoopShare
from serve_app.router.prefix_index import PrefixIndex
from tests.router.kv_engine import Engine, follow, joined, keys, removed, stored, until

StartEngine = Callable[..., Engine]


@pytest.fixture
async def quick(index: PrefixIndex) -> AsyncIterator[KvEventSubscriber]:
    """Asks after a short silence."""
    subscriber = KvEventSubscriber(index, replay_timeout_s=0.5, silence_s=0.1, retrust_s=0.6)
    yield subscriber
    await subscriber.close()
    index.check_integrity()
    assert (index.num_entries, len(asyncio.all_tasks())) == (0, 1)


@pytest.fixture
def ports(tmp_path: Path) -> dict[str, str]:
    """Where one engine after the other is bound."""
    return {"endpoint": f"ipc://{tmp_path}/e", "replay": f"ipc://{tmp_path}/r"}


def state_of(subscriber: KvEventSubscriber, replica_id: str = "a") -> FeedState:
    state = subscriber.feed(replica_id)
    assert state is not None
    return state


def frames(topic: str, seq: int, ts: float, *events: object) -> tuple[bytes, bytes, bytes]:
    return topic.encode(), seq.to_bytes(8, "big"), msgspec.msgpack.encode(KVEventBatch(ts=ts, events=list(events)))


async def followed_with_blocks(
    start_engine: StartEngine, subscriber: KvEventSubscriber, index: PrefixIndex, ports: dict[str, str]
) -> Engine:
    """An engine that published the blocks 1, 2 and 3 in three batches, all applied."""
    engine = start_engine("a", **ports)
    for name in (1, 2, 3):
        engine.publish(stored(name))
    await engine.flushed()
    await follow(subscriber, engine)
    await until(lambda: index.hit_blocks(keys(1, 2, 3)) == {"a": 3})
    return engine


async def test_quiet_restart_under_the_same_topic_is_found_at_the_next_question(
    start_engine: StartEngine, quick: KvEventSubscriber, index: PrefixIndex, ports: dict[str, str]
) -> None:
    first = await followed_with_blocks(start_engine, quick, index, ports)
    first.publisher.shutdown()
    start_engine("a", **ports)
    await until(lambda: index.num_blocks("a") == 0)
    assert (quick.counters.restarts, quick.counters.resets) == (1, 1)
    await until(lambda: quick.is_trusted("a"))


@pytest.mark.parametrize("num_batches", [1, 3, 4, 9])
async def test_restart_is_found_however_far_the_new_sequence_has_come(
    start_engine: StartEngine, quick: KvEventSubscriber, index: PrefixIndex, ports: dict[str, str], num_batches: int
) -> None:
    first = await followed_with_blocks(start_engine, quick, index, ports)
    first.publisher.shutdown()
    second = start_engine("a", **ports)
    for name in range(101, 101 + num_batches):
        second.publish_lost(stored(name))
    await until(lambda: index.hit_blocks(keys(*range(101, 101 + num_batches))) == {"a": num_batches})
    assert index.num_blocks("a") == num_batches
    second.publish(stored(200))
    await until(lambda: index.hit_blocks(keys(200)) == {"a": 1})
    assert (index.num_blocks("a"), quick.counters.restarts) == (num_batches + 1, 1)


async def test_live_gap_that_is_a_restart_brings_all_of_the_new_and_nothing_of_the_old(
    start_engine: StartEngine, subscriber: KvEventSubscriber, index: PrefixIndex, ports: dict[str, str]
) -> None:
    first = await followed_with_blocks(start_engine, subscriber, index, ports)
    first.publisher.shutdown()
    second = start_engine("a", **ports)
    for name in range(101, 106):
        second.publish_lost(stored(name))
    await asyncio.sleep(0.4)  # ZeroMQ reconnects the subscription by itself; nothing tells when
    second.publish(stored(106))
    await until(lambda: index.hit_blocks(keys(106)) == {"a": 1})
    assert index.hit_blocks(keys(101, 102, 103, 104, 105, 106)) == {"a": 6}
    assert (index.num_blocks("a"), subscriber.counters.restarts, subscriber.counters.gaps) == (6, 1, 1)


@pytest.mark.parametrize("seq", [3, 4, 50])
async def test_batch_of_a_dead_incarnation_is_thrown_away_wherever_its_sequence_stands(
    start_engine: StartEngine, subscriber: KvEventSubscriber, index: PrefixIndex, seq: int
) -> None:
    engine = start_engine("a")
    await joined(subscriber, engine, index)
    while subscriber.counters.batches < 3:
        engine.publish(stored(20_000 + subscriber.counters.batches))
        await engine.flushed()
    known = index.num_blocks("a")
    seq += subscriber.counters.batches - 3
    engine.publish_raw(*frames("a", seq, time.time() - 60.0, stored(666)))
    await until(lambda: subscriber.counters.dead_batches == 1)
    engine.publish(stored(1))
    await until(lambda: index.hit_blocks(keys(1)) == {"a": 1})
    assert (index.hit_blocks(keys(666)), index.num_blocks("a")) == ({}, known + 1)
    assert subscriber.counters.resets == 0, subscriber.counters


async def test_engine_whose_clock_was_set_back_loses_nothing(
    start_engine: StartEngine, subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a")
    await joined(subscriber, engine, index)
    known = index.num_blocks("a")
    for name in (1, 2, 3):
        engine.publisher.publish(KVEventBatch(ts=time.time() - 3_600.0 + name, events=[stored(name)]))
    await until(lambda: index.hit_blocks(keys(1, 2, 3)) == {"a": 3})
    counters = subscriber.counters
    assert (index.num_blocks("a"), counters.resets, counters.dead_batches) == (known + 3, 0, 0)


async def test_restart_under_another_topic_at_the_same_place_starts_from_an_empty_view(
    start_engine: StartEngine, quick: KvEventSubscriber, index: PrefixIndex, ports: dict[str, str]
) -> None:
    first = await followed_with_blocks(start_engine, quick, index, ports)
    first.publisher.shutdown()
    second = start_engine("a-2", **ports)
    second.publish(stored(2))
    await until(lambda: not quick.is_trusted("a"))  # the answer names another topic
    await follow(quick, second)
    await until(lambda: index.hit_blocks(keys(2)) == {"a": 1} and quick.is_trusted("a"))
    assert index.num_blocks("a") == 1


async def test_replica_unfollowed_in_the_middle_of_a_replay_leaves_nothing_behind(
    start_engine: StartEngine, subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a", buffer_steps=10_000)
    for name in range(2_000):
        engine.publish_lost(stored(*range(name * 20, name * 20 + 20)))
    await follow(subscriber, engine)
    await until(lambda: index.num_blocks("a") > 0)
    assert state_of(subscriber).is_filling
    await subscriber.unfollow("a")
    applied = subscriber.counters.batches
    assert applied < 2_000
    assert (index.num_entries, subscriber.feed("a"), subscriber.is_trusted("a")) == (0, None, False)
    await asyncio.wait({asyncio.create_task(turns(50))})
    assert (index.num_entries, subscriber.counters.batches, len(asyncio.all_tasks())) == (0, applied, 1)
    await follow(subscriber, engine)
    await until(lambda: index.num_blocks("a") == 40_000, timeout_s=30.0)


async def test_replica_unfollowed_while_nobody_answers_its_replay_frees_its_sockets(index: PrefixIndex) -> None:
    subscriber = KvEventSubscriber(index, replay_timeout_s=60.0)
    await subscriber.follow("a", "a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    await turns(20)
    begun_s = time.monotonic()
    await subscriber.close()
    assert time.monotonic() - begun_s < 10.0
    assert len(asyncio.all_tasks()) == 1


async def test_feed_is_trusted_once_heard_and_tells_silence_and_lag(
    start_engine: StartEngine, quick: KvEventSubscriber, index: PrefixIndex
) -> None:
    assert (quick.feed("a"), quick.is_trusted("a")) == (None, False)
    engine = start_engine("a")
    await follow(quick, engine)
    before = state_of(quick)
    assert (before.silent_s, before.is_trusted) == (math.inf, False)
    assert math.isnan(before.lag_s)
    await until(lambda: quick.is_trusted("a"))  # an empty answer is an answer
    engine.publisher.publish(KVEventBatch(ts=time.time() - 100.0, events=[stored(1)]))
    await until(lambda: index.hit_blocks(keys(1)) == {"a": 1})
    state = state_of(quick)
    assert state.lag_s == pytest.approx(100.0, abs=5.0)
    assert state.silent_s < 5.0
    assert (state.is_trusted, state.lossless_s) == (True, math.inf)


async def test_feed_whose_publisher_answers_no_more_is_not_trusted_until_it_is_heard_again(
    start_engine: StartEngine, quick: KvEventSubscriber, index: PrefixIndex, ports: dict[str, str]
) -> None:
    engine = await followed_with_blocks(start_engine, quick, index, ports)
    await until(lambda: quick.is_trusted("a"))
    engine.publisher.shutdown()
    await until(lambda: not quick.is_trusted("a"))
    assert state_of(quick).is_answering is False
    assert index.num_blocks("a") == 3
    start_engine("a", **ports)
    await until(lambda: quick.is_trusted("a"))


async def test_lost_batches_cost_trust_until_time_has_passed_or_the_cache_was_cleared(
    start_engine: StartEngine, quick: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a", buffer_steps=2)
    for name in range(5):
        engine.publish_lost(stored(name))
    await follow(quick, engine)
    await until(lambda: index.num_blocks("a") == 2)
    assert quick.counters.resets == 1
    await until(lambda: state_of(quick).is_answering)
    lost = state_of(quick)
    assert lost.is_trusted is (lost.lossless_s >= 0.6)
    await until(lambda: quick.is_trusted("a"))
    assert 0.6 <= state_of(quick).lossless_s < math.inf
    engine.publish(AllBlocksCleared())
    await until(lambda: state_of(quick).lossless_s == math.inf)


async def test_feed_without_replays_is_trusted_while_batches_come(
    start_engine: StartEngine, quick: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a")
    await quick.follow("a", "a", engine.endpoint, None)
    for marker in range(100):
        engine.publish(stored(marker))
        await engine.flushed()
        if index.num_blocks("a"):
            break
    engine.publish(stored(1_000))
    await until(lambda: index.hit_blocks(keys(1_000)) == {"a": 1})
    await until(lambda: not quick.is_trusted("a"))


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_large_batches_of_many_replicas_are_applied_in_slices_between_turns_of_the_loop(
    start_engine: StartEngine, subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engines = [start_engine(name) for name in "abc"]
    for number, engine in enumerate(engines):
        await joined(subscriber, engine, index, engine.topic)
        engine.publish(stored(*range(100_000 * number, 100_000 * number + 50_000)))
    most, entries = 0, index.num_entries
    deadline_s = time.monotonic() + 60.0
    while index.num_entries < 150_000 and time.monotonic() < deadline_s:
        await asyncio.sleep(0)
        most, entries = max(most, index.num_entries - entries), index.num_entries
    assert index.num_entries >= 150_000
    assert BLOCKS_A_TURN // 2 < most <= BLOCKS_A_TURN + SLICE_BLOCKS


async def test_share_of_the_loop_bounds_the_work_of_all_tasks_in_a_turn_and_serves_each() -> None:
    share, done = LoopShare(10), [0] * 5
    most = 0

    async def work(number: int) -> None:
        for _ in range(20):
            await share.take(3)
            done[number] += 3

    tasks = [asyncio.create_task(work(number)) for number in range(5)]
    while not all(task.done() for task in tasks):
        before = sum(done)
        await asyncio.sleep(0)
        most = max(most, sum(done) - before)
        assert max(done) - min(done) <= 15
    assert (done, most <= 12) == ([60] * 5, True)


def test_share_of_no_work_is_refused() -> None:
    with pytest.raises(ValueError, match="units_a_turn must be at least 1, got 0"):
        LoopShare(0)


@pytest.mark.parametrize("max_blocks", [1, 2, 3, 7, 100])
def test_slices_together_are_the_whole_batch_and_none_is_too_large(max_blocks: int) -> None:
    other_group = stored(90, 91, group_idx=1)
    events = [stored(*range(10)), removed(1), removed(2, 3), other_group, AllBlocksCleared(), stored(), stored(5, 6)]
    batch = open_batch(frames("a", 0, 1.5, *events)[2])
    parts = list(slices(batch, max_blocks))
    told: list[tuple[str, bytes]] = []
    for event in (event for part in parts for event in part):
        told += [(type(event).__name__, key) for key in getattr(event, "hashes", (b"",))]
    expected = [("StoredEvent", key) for key in keys(*range(10))] + [("RemovedEvent", key) for key in keys(1, 2, 3)]
    assert told == [*expected, ("ClearedEvent", b""), *(("StoredEvent", key) for key in keys(5, 6))]
    sizes = [sum(len(one.hashes) for one in p if isinstance(one, StoredEvent | RemovedEvent)) for p in parts]
    assert max(sizes) <= max_blocks
