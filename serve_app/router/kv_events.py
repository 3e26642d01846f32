"""Follows each replica's KV events over ZeroMQ and keeps a `PrefixIndex` in step with them.

Protocol (vllm/distributed/kv_events.py, `ZmqEventPublisher`): a PUB socket sends [topic, sequence, payload], sequence 8
bytes big-endian from 0; a ROUTER socket answers [b"", start sequence] with [b"", topic, sequence, payload] for every
batch that is still in its buffer and then [b"", b"", -1, b""]. Nothing is promised: a subscriber that connects late or
falls behind loses batches. So every batch is applied once and in order, what is missing is asked for again (a gap,
right after connecting, and after a silence), and where the buffer no longer holds it the replica's view is cleared:
less credit, never false credit.

The topic is the replica's unique id, so a socket that reconnects to another incarnation on the same port hears nothing.
An engine that restarts under the same topic gives itself away by a low sequence in a batch younger than the last one.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio

from serve_app.router.kv_event_batch import (
    ClearedEvent,
    KvEvent,
    RemovedEvent,
    StoredEvent,
    decode_batch,
    decode_stamped,
)
from serve_app.router.prefix_index import PrefixIndex

__all__ = ["KvEventCounters", "KvEventSubscriber", "decode_batch"]

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 2.0
"""Longest wait for the next part of a replay; the publisher looks for requests every 0.1 s."""
SILENCE_S = 5.0
"""After so long without a batch, ask whether there was one: the last batch before a silence may be lost, too."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
RECEIVE_QUEUE_BATCHES = 100_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

GapCallback = Callable[[str, int, int], None]
"""Called with replica id, first missing sequence, and the sequence that came instead."""


@dataclass(slots=True)
class KvEventCounters:
    """What happened to KV events in this process since its start, all replicas together."""

    batches: int = 0
    """Batches applied."""
    events: int = 0
    """Events applied."""
    gaps: int = 0
    """Times that a sequence was skipped."""
    replayed: int = 0
    """Batches that came by replay."""
    resets: int = 0
    """Times that a replica's view was cleared because batches were lost for good, or its engine had restarted."""
    decode_errors: int = 0
    """Messages or batches that could not be read."""


class KvEventSubscriber:
    """Follows any number of replicas, each with a task and a socket of its own, in the running event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        on_gap: GapCallback | None = None,
        *,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.counters = KvEventCounters()
        self._index = index
        self._context = zmq.asyncio.Context()
        self._shared = _Shared(self._context, index, self.counters, on_gap, replay_timeout_s, silence_s)
        self._tasks: dict[str, tuple[_Source, asyncio.Task[None]]] = {}

    async def follow(self, replica_id: str, topic: str, endpoint: str, replay_endpoint: str | None) -> None:
        """Start following a replica; returns once connecting has begun. The same source again changes nothing.

        Args:
            replica_id: whose view in the index the events change.
            topic: exact topic of the publisher, the replica's unique id.
            endpoint: where the publisher is bound, for example "tcp://10.0.0.7:41234".
            replay_endpoint: where it answers replays; None means that a gap always clears the view.

        Raises:
            ValueError: ZeroMQ refuses an endpoint.
        """
        source = _Source(replica_id, topic, endpoint, replay_endpoint)
        while (current := self._tasks.get(replica_id)) is not None:
            if current[0] == source and not current[1].done():
                return
            await self.unfollow(replica_id)
        stream = _Stream(source, self._shared)
        self._tasks[replica_id] = (source, asyncio.create_task(stream.run()))

    async def unfollow(self, replica_id: str) -> None:
        """Stop following a replica and drop it from the index; unknown ids are fine."""
        gone = self._tasks.pop(replica_id, None)
        if gone is not None:
            gone[1].cancel()
        self._index.drop(replica_id)
        if gone is not None:
            await asyncio.wait({gone[1]})

    async def close(self) -> None:
        """Stop following everybody, drop them from the index, and free the sockets."""
        for replica_id in list(self._tasks):
            await self.unfollow(replica_id)
        self._context.destroy(linger=0)


@dataclass(frozen=True, slots=True)
class _Source:
    replica_id: str
    topic: str
    endpoint: str
    replay_endpoint: str | None


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the streams of one subscriber have in common."""

    context: zmq.asyncio.Context
    index: PrefixIndex
    counters: KvEventCounters
    on_gap: GapCallback | None
    replay_timeout_s: float
    silence_s: float


class _Stream:
    """One replica's batches, applied once and in order. `run` ends only by cancellation or by a bug, which it logs."""

    def __init__(self, source: _Source, shared: _Shared) -> None:
        self._source, self._shared = source, shared
        self._counters = shared.counters
        self._topic = source.topic.encode()
        self._next_seq = 0
        self._last_ts = float("-inf")
        if source.replay_endpoint is not None:  # a bad one must fail here, not at the first gap
            self._connected(zmq.DEALER, source.replay_endpoint).close(linger=0)
        self._live = self._connected(zmq.SUB, source.endpoint)

    async def run(self) -> None:
        try:
            await self._replay()
            while True:
                if await self._live.poll(self._shared.silence_s * 1000):
                    await self._take(await self._live.recv_multipart())
                    await asyncio.sleep(0)  # a flood of events must not hold up routing in the same loop
                else:
                    await self._replay()
        except Exception:
            self._shared.index.clear(self._source.replica_id)
            logger.exception("Stopped following the KV events of %s", self._source)
        finally:
            self._live.close(linger=0)

    async def _take(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            self._counters.decode_errors += 1
            return
        if parts[0] != self._topic:  # a subscription matches by prefix
            return
        seq, payload = int.from_bytes(parts[1], "big"), parts[2]
        if seq < self._next_seq:
            if not self._is_restart(payload):
                return
            self._reset(0)
        if seq > self._next_seq:
            await self._fill_gap(seq)
        if seq == self._next_seq:
            self._apply(seq, payload)

    async def _fill_gap(self, seq: int) -> None:
        """Get everything before `seq` by replay, or clear the view and go on from `seq`."""
        self._counters.gaps += 1
        if self._shared.on_gap is not None:
            self._shared.on_gap(self._source.replica_id, self._next_seq, seq)
        await self._replay()
        if seq > self._next_seq:
            self._reset(seq)

    async def _replay(self) -> None:
        """Apply what the publisher still has from the next sequence on; does nothing when it doesn't answer."""
        while self._source.replay_endpoint is not None:
            asked_for = self._next_seq
            if await self._replay_once(self._source.replay_endpoint) or self._next_seq == asked_for:
                return

    async def _replay_once(self, endpoint: str) -> bool:
        """Ask for one replay; False when it broke off: a ROUTER socket drops what its queue of 1,000 can't take."""
        socket = self._connected(zmq.DEALER, endpoint)
        asked_for = self._next_seq
        try:
            await socket.send_multipart([b"", asked_for.to_bytes(8, "big")])
            while await socket.poll(self._shared.replay_timeout_s * 1000):
                parts = (await socket.recv_multipart())[1:]
                if len(parts) != 3 or parts[1] == END_OF_REPLAY or parts[0] != self._topic:
                    return True
                seq = int.from_bytes(parts[1], "big")
                if seq > self._next_seq > asked_for:
                    return False
                self._take_replayed(seq, parts[2])
                await asyncio.sleep(0)
            return False
        finally:
            socket.close(linger=0)

    def _take_replayed(self, seq: int, payload: bytes) -> None:
        if seq > self._next_seq:  # the first that came, so older ones have left the publisher's buffer
            self._reset(seq)
        if seq == self._next_seq:
            self._counters.replayed += 1
            self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self._next_seq = seq + 1
        try:
            ts, events = decode_stamped(payload)
        except ValueError:
            self._counters.decode_errors += 1
            self._reset(self._next_seq)  # it may have held removals
            return
        self._last_ts = max(self._last_ts, ts)
        self._counters.batches += 1
        self._counters.events += len(events)
        for event in events:
            self._apply_event(event)

    def _apply_event(self, event: KvEvent) -> None:
        match event:
            case StoredEvent(hashes):
                self._shared.index.stored(self._source.replica_id, hashes)
            case RemovedEvent(hashes):
                self._shared.index.removed(self._source.replica_id, hashes)
            case ClearedEvent():
                self._shared.index.clear(self._source.replica_id)

    def _is_restart(self, payload: bytes) -> bool:
        """An old sequence is one that a replay has brought already, unless the batch is younger than all before it."""
        try:
            return decode_stamped(payload)[0] > self._last_ts
        except ValueError:
            return False

    def _reset(self, next_seq: int) -> None:
        self._counters.resets += 1
        self._shared.index.clear(self._source.replica_id)
        self._next_seq = next_seq

    def _connected(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._shared.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ValueError(f"cannot connect to {endpoint!r}: {error}") from error
        return socket
