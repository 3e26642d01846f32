"""The subscriber against vLLM's real publisher on loopback: late joins, lost batches, restarts, hostile bytes."""

import asyncio
import random
import time
from collections.abc import Callable

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch

from serve_app.router.kv_event_batch import ClearedEvent, KvEvent, RemovedEvent, StoredEvent
from serve_app.router.kv_events import KvEventSubscriber, decode_batch
from serve_app.router.prefix_index import PrefixIndex
from tests.router.kv_engine import Engine, follow, joined, keys, removed, stored, until


async def test_late_joiner_learns_what_was_published_before(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1")
    engine.publish(stored(1, 2, 3))
    engine.publish(removed(3), stored(4))
    await engine.flushed()
    await follow(subscriber, engine)
    await until(lambda: subscriber.counters.replayed == 2)
    assert index.hit_blocks(keys(1, 2, 3)) == {"a": 2}
    assert index.hit_blocks(keys(4)) == {"a": 1}
    engine.publish(stored(3))
    await until(lambda: index.hit_blocks(keys(1, 2, 3)) == {"a": 3})
    counters = subscriber.counters
    assert (counters.batches, counters.events, counters.gaps, counters.resets) == (3, 4, 0, 0)


async def test_live_events_change_the_view_in_order(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1")
    await joined(subscriber, engine, index)
    engine.publish(stored(1, 2), stored(1, 2), removed(2), removed(2), stored(7))
    await until(lambda: index.hit_blocks(keys(7)) == {"a": 1})
    assert index.hit_blocks(keys(1, 2)) == {"a": 1}
    engine.publish(AllBlocksCleared(), stored(8))
    await until(lambda: index.hit_blocks(keys(8)) == {"a": 1})
    assert index.num_blocks("a") == 1


async def test_lost_batch_is_replayed_before_later_ones_are_applied(
    start_engine: Callable[..., Engine], index: PrefixIndex
) -> None:
    gaps: list[tuple[str, int, int]] = []
    subscriber = KvEventSubscriber(index, lambda *gap: gaps.append(gap))
    engine = start_engine("a-1")
    await joined(subscriber, engine, index)
    known = subscriber.counters.batches
    engine.publish_lost(stored(1, 2))
    engine.publish(removed(2))
    await until(lambda: subscriber.counters.batches == known + 2)
    assert index.hit_blocks(keys(1, 2)) == {"a": 1}
    assert (subscriber.counters.gaps, subscriber.counters.resets) == (1, 0)
    assert gaps == [("a", known, known + 1)]
    engine.publish(stored(5))
    await until(lambda: index.hit_blocks(keys(5)) == {"a": 1})
    assert subscriber.counters.batches == known + 3
    await subscriber.close()


async def test_view_is_cleared_when_the_buffer_no_longer_holds_what_is_missing(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1", buffer_steps=2)
    await joined(subscriber, engine, index)
    engine.publish(stored(1))
    await until(lambda: index.hit_blocks(keys(1)) == {"a": 1})
    for name in (2, 3, 4):
        engine.publish_lost(stored(name))
    engine.publish(stored(5))
    await until(lambda: index.hit_blocks(keys(5)) == {"a": 1})
    assert subscriber.counters.resets == 1
    assert [index.hit_blocks(keys(name)) for name in (1, 2, 3)] == [{}, {}, {}]
    assert index.hit_blocks(keys(4)) == {"a": 1}


async def test_view_is_cleared_on_a_gap_when_there_is_no_replay(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1")
    await subscriber.follow("a", "a-1", engine.endpoint, None)
    await asyncio.sleep(0.2)
    engine.publish(stored(1))
    await until(lambda: index.hit_blocks(keys(1)) == {"a": 1})
    engine.publish_lost(removed(1))
    engine.publish(stored(2))
    await until(lambda: index.hit_blocks(keys(2)) == {"a": 1})
    assert index.hit_blocks(keys(1)) == {}
    assert (subscriber.counters.gaps, subscriber.counters.resets, subscriber.counters.replayed) == (1, 1, 0)


async def test_last_batch_before_a_silence_is_asked_for(
    start_engine: Callable[..., Engine], index: PrefixIndex
) -> None:
    subscriber = KvEventSubscriber(index, silence_s=0.1)
    engine = start_engine("a-1")
    await joined(subscriber, engine, index)
    engine.publish_lost(stored(1))
    await until(lambda: index.hit_blocks(keys(1)) == {"a": 1})
    assert (subscriber.counters.gaps, subscriber.counters.resets) == (0, 0)
    await subscriber.close()


async def test_replay_longer_than_the_publishers_queue_loses_nothing(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1", buffer_steps=10_000)
    for name in range(3_000):
        engine.publish_lost(stored(*range(name * 50, name * 50 + 50)))
    await follow(subscriber, engine)
    await until(lambda: index.num_blocks("a") == 150_000, timeout_s=20.0)
    assert (subscriber.counters.resets, subscriber.counters.batches) == (0, 3_000)


async def test_replay_that_breaks_off_in_the_middle_is_asked_for_again(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1")
    publisher, serve = engine.publisher, engine.publisher._service_replay
    for name in (1, 2, 3):
        engine.publish_lost(stored(name))

    def serve_with_a_hole() -> None:
        whole, publisher._service_replay = publisher._buffer, serve
        publisher._buffer = [whole[0], whole[2]]
        serve()
        publisher._buffer = whole

    publisher._service_replay = serve_with_a_hole
    await follow(subscriber, engine)
    await until(lambda: index.hit_blocks(keys(1, 2, 3)) == {"a": 3})
    assert (subscriber.counters.resets, subscriber.counters.replayed) == (0, 3)


async def test_batches_of_another_topic_are_never_credited(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1")
    await joined(subscriber, engine, index)
    before = index.num_blocks("a")
    payload = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=[stored(1)]))
    engine.publish_raw(b"a-10", bytes(8), payload)  # passes a subscription to "a-1", which goes by prefix
    await engine.flushed()
    engine.publish(stored(2))
    await until(lambda: index.hit_blocks(keys(2)) == {"a": 1})
    assert index.hit_blocks(keys(1)) == {}
    assert index.num_blocks("a") == before + 1


async def test_new_incarnation_on_the_same_socket_is_heard_only_under_its_own_topic(
    start_engine: Callable[..., Engine],
    subscriber: KvEventSubscriber,
    index: PrefixIndex,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    endpoint = f"ipc://{tmp_path_factory.mktemp('kv')}/e"
    first = start_engine("a-1", endpoint)
    await joined(subscriber, first, index)
    first.publish(stored(1))
    await until(lambda: index.hit_blocks(keys(1)) == {"a": 1})
    first.publisher.shutdown()
    second = start_engine("a-2", endpoint)
    await asyncio.sleep(0.4)  # ZeroMQ reconnects the old subscription by itself
    second.publish(stored(2))
    await second.flushed()
    assert index.hit_blocks(keys(2)) == {}
    await follow(subscriber, second)
    await until(lambda: index.hit_blocks(keys(2)) == {"a": 1})
    assert index.hit_blocks(keys(1)) == {}


async def test_engine_restarted_under_the_same_topic_gets_no_credit_for_its_old_blocks(
    start_engine: Callable[..., Engine],
    subscriber: KvEventSubscriber,
    index: PrefixIndex,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    endpoint = f"ipc://{tmp_path_factory.mktemp('kv')}/e"
    first = start_engine("a", endpoint)
    await subscriber.follow("a", "a", endpoint, None)
    await asyncio.sleep(0.2)
    for name in (1, 2, 3):
        first.publish(stored(name))
    await until(lambda: index.num_blocks("a") == 3)
    first.publisher.shutdown()
    second = start_engine("a", endpoint)
    await asyncio.sleep(0.4)
    second.publish(stored(4))
    await until(lambda: index.hit_blocks(keys(4)) == {"a": 1})
    assert (index.num_blocks("a"), subscriber.counters.resets) == (1, 1)


async def test_unreadable_batch_clears_the_view_and_the_stream_goes_on(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1")
    await joined(subscriber, engine, index)
    engine.publish_raw(b"a-1", next(engine.publisher._seq_gen).to_bytes(8, "big"), b"\xc1")
    engine.publish_raw(b"a-1", b"short", b"")
    engine.publish_raw(b"a-1", bytes(8), b"\xc1")  # an old sequence is skipped, whatever it holds
    engine.publish_raw(b"a-1")
    await until(lambda: subscriber.counters.decode_errors == 3)
    assert index.num_blocks("a") == 0
    engine.publish(stored(1))
    await until(lambda: index.hit_blocks(keys(1)) == {"a": 1})
    assert (subscriber.counters.resets, subscriber.counters.gaps) == (1, 0)


async def test_unfollowed_replica_is_dropped_and_heard_no_more(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine, other = start_engine("a-1"), start_engine("b-1")
    await joined(subscriber, engine, index, "a")
    await joined(subscriber, other, index, "b")
    await subscriber.unfollow("a")
    await subscriber.unfollow("never followed")
    engine.publish(stored(1))
    other.publish(stored(1))
    await until(lambda: index.hit_blocks(keys(1)) == {"b": 1})
    assert index.num_blocks("a") == 0


async def test_following_the_same_source_again_changes_nothing(
    start_engine: Callable[..., Engine], subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    engine = start_engine("a-1")
    await joined(subscriber, engine, index)
    known = subscriber.counters.batches
    await follow(subscriber, engine)
    engine.publish(stored(1))
    await until(lambda: index.hit_blocks(keys(1)) == {"a": 1})
    assert subscriber.counters.batches == known + 1


async def test_bug_in_the_callback_clears_the_view_and_following_again_recovers(
    start_engine: Callable[..., Engine], index: PrefixIndex, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    subscriber = KvEventSubscriber(index, fail)
    engine = start_engine("a-1")
    await joined(subscriber, engine, index)
    engine.publish_lost(stored(1))
    engine.publish(stored(2))
    await until(lambda: index.num_blocks("a") == 0)
    assert "Stopped following the KV events" in caplog.text
    await until(lambda: len(asyncio.all_tasks()) == 1)
    await follow(subscriber, engine)
    await until(lambda: index.hit_blocks(keys(1, 2)) == {"a": 2})
    await subscriber.close()


@pytest.mark.parametrize("endpoints", [("tcp://nowhere", None), ("tcp://127.0.0.1:1", "what")])
async def test_impossible_endpoint_is_refused(endpoints: tuple[str, str | None], subscriber: KvEventSubscriber) -> None:
    with pytest.raises(ValueError, match="cannot connect to"):
        await subscriber.follow("a", "a-1", *endpoints)


async def test_silent_endpoint_keeps_the_subscriber_waiting_without_harm(
    subscriber: KvEventSubscriber, index: PrefixIndex
) -> None:
    await subscriber.follow("a", "a-1", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    await asyncio.sleep(0.7)
    assert index.num_entries == 0


def encoded(*events: object) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=list(events), data_parallel_rank=0))


def test_batch_decodes_to_its_events_in_order() -> None:
    expected: list[KvEvent] = [StoredEvent(keys(1, 2)), RemovedEvent(keys(1)), ClearedEvent()]
    assert decode_batch(encoded(stored(1, 2), removed(1), AllBlocksCleared())) == expected


def test_blocks_outside_the_engines_own_gpu_memory_or_of_another_group_are_left_out() -> None:
    remote = stored(3)
    remote.locality = "REMOTE"
    assert decode_batch(encoded(stored(1, medium="CPU"), stored(2, group_idx=1), remote, stored(4))) == [
        StoredEvent(keys(4))
    ]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x92\x00" + b"\xdd\xff\xff\xff\xff",
        b"\x93\x00\x90" + b"\x91" * 100_000 + b"\x90",
        encoded({"type": "BlockStored"}),
        encoded({"type": "Nothing"}),
        encoded(BlockRemoved(block_hashes=[-1], medium="GPU")),
        encoded(BlockRemoved(block_hashes=[b"short"], medium="GPU")),
        encoded(BlockRemoved(block_hashes=["text"], medium="GPU")),
    ],
)
def test_hostile_batch_raises_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode_batch(payload)


def test_random_bytes_raise_nothing_but_value_error() -> None:
    rng, valid = random.Random(0), encoded(stored(1, 2), removed(1), AllBlocksCleared())
    for _ in range(5_000):
        mutated = bytearray(valid[: rng.randrange(len(valid) + 1)])
        for _ in range(rng.randrange(4)):
            if mutated:
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            decode_batch(bytes(mutated))
        except ValueError:
            continue
