"""Follows each replica's KV events over ZeroMQ and keeps a `PrefixIndex` in step with them.

Each replica has a stream of its own (`kv_event_stream`, where the protocol is told); this module starts and stops them
and says how far each replica's view may be trusted.
"""

import asyncio
import time

import zmq.asyncio

from serve_app.router.kv_event_batch import decode_batch
from serve_app.router.kv_event_feed import FeedState, KvEventCounters
from serve_app.router.kv_event_stream import (
    REPLAY_TIMEOUT_S,
    RETRUST_S,
    SILENCE_S,
    GapCallback,
    Shared,
    Source,
    Stream,
)
from serve_app.router.loop_share import LoopShare
from serve_app.router.prefix_index import PrefixIndex

__all__ = ["FeedState", "KvEventCounters", "KvEventSubscriber", "decode_batch"]

BLOCKS_A_TURN = 2_000
"""Blocks that are applied in one turn of the event loop, of all replicas together: about 1 ms."""


class KvEventSubscriber:
    """Follows any number of replicas, each with a task and a socket of its own, in the running event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        on_gap: GapCallback | None = None,
        *,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        silence_s: float = SILENCE_S,
        retrust_s: float = RETRUST_S,
    ) -> None:
        self.counters = KvEventCounters()
        self._index = index
        self._context = zmq.asyncio.Context()
        self._shared = Shared(
            self._context,
            index,
            self.counters,
            on_gap,
            replay_timeout_s,
            silence_s,
            retrust_s,
            LoopShare(BLOCKS_A_TURN),
        )
        self._followed: dict[str, tuple[Stream, asyncio.Task[None]]] = {}

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
        source = Source(replica_id, topic, endpoint, replay_endpoint)
        while (current := self._followed.get(replica_id)) is not None:
            if current[0].source == source and not current[1].done():
                return
            await self.unfollow(replica_id)
        stream = Stream(source, self._shared)
        self._followed[replica_id] = (stream, asyncio.create_task(stream.run()))

    async def unfollow(self, replica_id: str) -> None:
        """Stop following a replica and drop it from the index; unknown ids are fine."""
        gone = self._followed.pop(replica_id, None)
        if gone is not None:
            gone[1].cancel()
        self._index.drop(replica_id)
        if gone is not None:
            await asyncio.wait({gone[1]})

    def feed(self, replica_id: str) -> FeedState | None:
        """How the replica's feed stands now; None when it is not followed."""
        followed = self._followed.get(replica_id)
        return followed[0].feed(time.monotonic()) if followed else None

    def is_trusted(self, replica_id: str) -> bool:
        """Whether the replica's view in the index is worth going by (`FeedState.is_trusted`); False when unfollowed."""
        state = self.feed(replica_id)
        return state is not None and state.is_trusted

    async def close(self) -> None:
        """Stop following everybody, drop them from the index, and free the sockets."""
        for replica_id in list(self._followed):
            await self.unfollow(replica_id)
        self._context.destroy(linger=0)
