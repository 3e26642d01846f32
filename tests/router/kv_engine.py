"""A real publisher of KV events on loopback, with what an engine and a network would do to it."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from serve_app.router.block_hashes import block_key
from serve_app.router.kv_events import KvEventSubscriber
from serve_app.router.prefix_index import PrefixIndex

Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
LOOPBACK = "tcp://127.0.0.1:*"
"""vLLM's publisher binds only where its endpoint holds a wildcard; this one is for the port."""


def keys(*names: int) -> tuple[bytes, ...]:
    return tuple(map(block_key, names))


def stored(*names: int, medium: str = "GPU", group_idx: int = 0) -> BlockStored:
    return BlockStored(
        block_hashes=list(names),
        parent_block_hash=None,
        token_ids=[1] * 16 * len(names),
        block_size=16,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[None] * len(names),
        group_idx=group_idx,
    )


def removed(*names: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(names), medium="GPU", group_idx=0)


class Engine:
    """A real publisher with what an engine would do to it, and the one thing that a network does: lose a batch."""

    def __init__(self, topic: str, endpoint: str = LOOPBACK, buffer_steps: int = 100, replay: str = LOOPBACK) -> None:
        self.topic = topic
        self.publisher = ZmqEventPublisher(0, endpoint, replay, topic=topic, buffer_steps=buffer_steps)
        self.endpoint = self.publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self.publisher._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, *events: Event) -> None:
        self.publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def publish_lost(self, *events: Event) -> None:
        """A batch that is sent and buffered, but never reaches the subscriber."""
        payload = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=list(events)))
        self.publisher._buffer.append((next(self.publisher._seq_gen), payload))

    def publish_raw(self, *parts: bytes) -> None:
        self.publisher._pub.send_multipart(parts)

    async def flushed(self) -> None:
        await until(self.publisher._event_queue.empty)
        await asyncio.sleep(0.15)  # the publisher's thread takes from its queue before it sends


async def until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "did not happen in time"
        await asyncio.sleep(0.005)


async def follow(subscriber: KvEventSubscriber, engine: Engine, replica_id: str = "a") -> None:
    await subscriber.follow(replica_id, engine.topic, engine.endpoint, engine.replay_endpoint)


async def joined(subscriber: KvEventSubscriber, engine: Engine, index: PrefixIndex, replica_id: str = "a") -> None:
    """Follow, and publish markers until one has come over the live socket."""
    await follow(subscriber, engine, replica_id)
    for marker in range(10_000, 10_100):
        engine.publish(stored(marker))
        await engine.flushed()
        if index.hit_blocks(keys(marker)):
            return
    raise AssertionError("never joined")
