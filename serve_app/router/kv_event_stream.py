"""One replica's KV events over ZeroMQ: every batch applied once and in order, or the view cleared.

Protocol (vllm/distributed/kv_events.py, `ZmqEventPublisher`): a PUB socket sends [topic, sequence, payload], sequence 8
bytes big-endian from 0; a ROUTER socket answers [b"", start sequence] with [b"", topic, sequence, payload] for every
batch that is still in its buffer and then [b"", b"", -1, b""]. Nothing is promised: a subscriber that connects late or
falls behind loses batches. What is missing is asked for again (a gap, right after connecting, and after a silence), and
where the buffer no longer holds it the replica's view is cleared: less credit, never false credit.

The topic is the replica's unique id, so a socket that reconnects to another incarnation on the same port hears nothing.
An engine that restarts under the same topic gives itself away: by a low sequence in a batch younger than the last one,
or in a replay, which is asked for from the last applied batch on: another batch, or none, stands in its place. What a
dead incarnation still has in a queue is older than the last batch, or not in the buffer of the one that answers.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import zmq
import zmq.asyncio

from serve_app.router.kv_event_batch import (
    ClearedEvent,
    KvBatch,
    KvEvent,
    RemovedEvent,
    StoredEvent,
    open_batch,
    slices,
)
from serve_app.router.kv_event_feed import FeedState, KvEventCounters
from serve_app.router.loop_share import LoopShare
from serve_app.router.prefix_index import PrefixIndex

logger = logging.getLogger("serve_app.router.kv_events")

REPLAY_TIMEOUT_S = 2.0
"""Longest wait for the next part of a replay; the publisher looks for requests every 0.1 s."""
SILENCE_S = 5.0
"""After so long without a batch, ask whether there was one: the last batch before a silence may be lost, too."""
RETRUST_S = 30.0
"""So long after a loss a view is worth going by again: most of what the replica uses has been stored anew by then."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
RECEIVE_QUEUE_BATCHES = 100_000
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SLICE_BLOCKS = 500
"""Blocks applied between two looks at the loop's share."""
BYTES_A_BLOCK = 256
"""Opening so many bytes of a batch takes about as long as applying one block."""

GapCallback = Callable[[str, int, int], None]
"""Called with replica id, first missing sequence, and the sequence that came instead."""


@dataclass(frozen=True, slots=True)
class Source:
    """Whose events, and where they come from."""

    replica_id: str
    topic: str
    endpoint: str
    replay_endpoint: str | None


@dataclass(frozen=True, slots=True)
class Shared:
    """What the streams of one subscriber have in common."""

    context: zmq.asyncio.Context
    index: PrefixIndex
    counters: KvEventCounters
    on_gap: GapCallback | None
    replay_timeout_s: float
    silence_s: float
    retrust_s: float
    loop_share: LoopShare


class _Replay(Enum):
    COMPLETE = "complete"
    """The publisher has no batch that was not applied."""
    BROKEN_OFF = "broken off"
    """More is to be had by asking again."""
    NO_ANSWER = "no answer"


class Stream:
    """One replica's batches. `run` ends only by cancellation or by a bug, which it logs."""

    def __init__(self, source: Source, shared: Shared) -> None:
        self.source, self._shared = source, shared
        self._counters = shared.counters
        self._topic = source.topic.encode()
        self._next_seq = 0
        self._last_ts = -math.inf
        """Of the batch applied last; -inf before the first and when it could not be read."""
        self._replays_batches = False
        """Whether the publisher ever replayed a batch: one without a buffer tells nothing by replaying none."""
        self._heard_s = -math.inf
        self._lost_s = -math.inf
        self._lag_s = math.nan
        self._is_answering = True
        self._is_filling = True
        if source.replay_endpoint is not None:  # a bad one must fail here, not at the first gap
            self._connected(zmq.DEALER, source.replay_endpoint).close(linger=0)
        self._live = self._connected(zmq.SUB, source.endpoint)

    def feed(self, now_s: float) -> FeedState:
        """Args: now_s: `time.monotonic`."""
        lossless_s = now_s - self._lost_s
        is_fed = self._is_answering and not self._is_filling and self._heard_s > -math.inf
        return FeedState(
            silent_s=now_s - self._heard_s,
            lag_s=self._lag_s,
            is_answering=self._is_answering,
            is_filling=self._is_filling,
            lossless_s=lossless_s,
            is_trusted=is_fed and lossless_s >= self._shared.retrust_s,
        )

    async def run(self) -> None:
        """Follow the source until cancelled."""
        try:
            await self._ask()
            while True:
                if await self._live.poll(self._shared.silence_s * 1000):
                    await self._take_all()
                else:
                    await self._ask()
        except Exception:
            self._is_answering = False
            self._shared.index.clear(self.source.replica_id)
            logger.exception("Stopped following the KV events of %s", self.source)
        finally:
            self._live.close(linger=0)

    async def _take_all(self) -> None:
        waiting: zmq.Socket[bytes] = zmq.Socket.shadow(
            self._live
        )  # a future for each message would cost more than most batches
        while True:
            await self._shared.loop_share.take(1)
            try:
                parts = waiting.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            await self._take(parts)

    async def _take(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            self._counters.decode_errors += 1
            return
        if parts[0] != self._topic:  # a subscription matches by prefix
            return
        seq, batch = int.from_bytes(parts[1], "big"), await self._open(parts[2])
        ts = batch.ts if batch else self._last_ts
        if seq < self._next_seq:
            if ts <= self._last_ts:  # a replay has brought it already
                return
            self._restart()
        if (seq == self._next_seq and ts >= self._last_ts) or await self._fill_gap(seq):
            await self._apply(seq, batch)

    async def _fill_gap(self, seq: int) -> bool:
        """Get everything before `seq` by replay, or clear the view and go on from `seq`.

        Returns: whether the batch is still to be applied; the publisher may have replayed it, or not know it at all.
        """
        self._is_filling = True
        if seq > self._next_seq:
            self._counters.gaps += 1
            if self._shared.on_gap is not None:
                self._shared.on_gap(self.source.replica_id, self._next_seq, seq)
        is_complete = await self._ask()
        self._is_filling = False
        if seq >= self._next_seq and is_complete:
            self._counters.dead_batches += 1
            return False
        if seq > self._next_seq:
            self._lose(seq)
        return seq == self._next_seq

    async def _ask(self) -> bool:
        """Apply what the publisher still has from the next sequence on; whether that is all it has published."""
        if self.source.replay_endpoint is None:
            self._is_answering = self._is_filling = False
            return False
        outcome = _Replay.BROKEN_OFF
        while outcome is _Replay.BROKEN_OFF:
            asked_for = self._next_seq
            outcome = await self._replay(self.source.replay_endpoint)
            if self._next_seq == asked_for and outcome is _Replay.BROKEN_OFF:
                outcome = _Replay.NO_ANSWER
        self._is_answering, self._is_filling = outcome is _Replay.COMPLETE, False
        return self._is_answering and self._replays_batches

    async def _replay(self, endpoint: str) -> _Replay:
        """Ask once, from the batch applied last. A ROUTER socket drops what its queue of 1,000 can't take."""
        socket = self._connected(zmq.DEALER, endpoint)
        is_first, asked_for = True, max(0, self._next_seq - 1)
        try:
            await socket.send_multipart([b"", asked_for.to_bytes(8, "big")])
            while await socket.poll(self._shared.replay_timeout_s * 1000):
                parts = (await socket.recv_multipart())[1:]
                if len(parts) == 3 and parts[1] == END_OF_REPLAY:
                    return self._end_replay(is_first)
                if len(parts) != 3 or parts[0] != self._topic:
                    return _Replay.NO_ANSWER
                if not await self._take_replayed(int.from_bytes(parts[1], "big"), parts[2], is_first):
                    return _Replay.BROKEN_OFF
                is_first = False
            return _Replay.NO_ANSWER if is_first else _Replay.BROKEN_OFF
        finally:
            socket.close(linger=0)

    def _end_replay(self, is_empty: bool) -> _Replay:
        self._heard_s = time.monotonic()
        if is_empty and self._next_seq and self._replays_batches:
            self._restart()  # the last applied batch is not there, nor a younger one: nothing was published yet
        return _Replay.COMPLETE

    async def _take_replayed(self, seq: int, payload: bytes, is_first: bool) -> bool:
        """Apply the batch if it is the next; False when the replay must be asked for anew."""
        self._replays_batches = True
        batch = await self._open(payload)
        if seq > self._next_seq:
            if not is_first:
                return False
            self._lose(seq)  # older ones have left the publisher's buffer
        if seq == self._next_seq:
            self._counters.replayed += 1
            await self._apply(seq, batch)
        elif seq == self._next_seq - 1 and batch and batch.ts != self._last_ts > -math.inf:
            self._restart()
            return False
        return True

    async def _open(self, payload: bytes) -> KvBatch | None:
        await self._shared.loop_share.take(1 + len(payload) // BYTES_A_BLOCK)
        try:
            return open_batch(payload)
        except ValueError:
            return None

    async def _apply(self, seq: int, batch: KvBatch | None) -> None:
        self._next_seq, self._heard_s, self._is_answering = seq + 1, time.monotonic(), True
        self._last_ts = batch.ts if batch else -math.inf
        try:
            if batch is None:
                raise ValueError
            for part in slices(batch, SLICE_BLOCKS):
                await self._shared.loop_share.take(sum(map(_num_blocks, part)) + 1)
                for event in part:
                    self._apply_event(event)
        except ValueError:
            self._counters.decode_errors += 1
            self._last_ts = -math.inf
            self._lose(self._next_seq)  # it may have held removals
            return
        self._lag_s = time.time() - batch.ts
        self._counters.batches += 1
        self._counters.events += len(batch.events)

    def _apply_event(self, event: KvEvent) -> None:
        match event:
            case StoredEvent(hashes):
                self._shared.index.stored(self.source.replica_id, hashes)
            case RemovedEvent(hashes):
                self._shared.index.removed(self.source.replica_id, hashes)
            case ClearedEvent():
                self._shared.index.clear(self.source.replica_id)
                self._lost_s = -math.inf

    def _lose(self, next_seq: int) -> None:
        """Batches before `next_seq` are lost for good."""
        self._counters.resets += 1
        self._shared.index.clear(self.source.replica_id)
        self._next_seq, self._lost_s = next_seq, time.monotonic()

    def _restart(self) -> None:
        """The engine is another one under the old topic: nothing of its batches was applied yet."""
        self._counters.resets += 1
        self._counters.restarts += 1
        self._shared.index.clear(self.source.replica_id)
        self._next_seq, self._last_ts, self._lost_s = 0, -math.inf, -math.inf

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


def _num_blocks(event: KvEvent) -> int:
    return 1 if isinstance(event, ClearedEvent) else len(event.hashes)
