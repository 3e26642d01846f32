"""One replica's life-cycle events on their way to every ingress: batched, numbered, healed.

`report` only appends; one task sends. While a broadcast is under way the next batch gathers, so a slow ingress costs
batching, not requests. Every few seconds the ids of all open requests go along: an ingress that lost a batch, or routed
a request that never arrived, releases what its replica does not know of.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from serve_app.router.lifecycle import Closed, LifecycleBatch, LifecycleEvent, Opened

logger = logging.getLogger("ray.serve")

Send = Callable[[LifecycleBatch], Awaitable[None]]

MAX_EVENTS_KEPT = 10_000
"""Bound of events that wait while no ingress can be reached; the oldest go first and the open list heals the rest."""


class EventForwarder:
    """Owns the replica's open requests and its sequence numbers."""

    def __init__(self, replica_id: str, send: Send, heal_every_s: float = 3.0) -> None:
        self._replica_id = replica_id
        self._send = send
        self._heal_every_s = heal_every_s
        self._waiting: list[LifecycleEvent] = []
        self._wake = asyncio.Event()
        self._open: set[str] = set()
        self._queued_s: dict[str, float] = {}
        self._seq = 0
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin sending on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop sending; what still waits is lost, and healed by the departure of this replica."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    @property
    def open_ids(self) -> frozenset[str]:
        """Requests that were opened and not closed."""
        return frozenset(self._open)

    @property
    def queued_prefill_s(self) -> float:
        """Expected prefill seconds of the requests that have no token yet."""
        return math.fsum(self._queued_s.values())

    def report(self, event: LifecycleEvent) -> None:
        """Queue one event; never blocks."""
        if isinstance(event, Opened):
            self._open.add(event.request_id)
            self._queued_s[event.request_id] = event.service_s
        else:
            self._queued_s.pop(event.request_id, None)
        if isinstance(event, Closed):
            self._open.discard(event.request_id)
        self._waiting.append(event)
        del self._waiting[:-MAX_EVENTS_KEPT]
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        heal_at = loop.time()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, heal_at - loop.time()))
            self._wake.clear()
            heal = loop.time() >= heal_at
            if heal:
                heal_at = loop.time() + self._heal_every_s
            await self._deliver(heal)

    async def _deliver(self, heal: bool) -> None:
        events, self._waiting = tuple(self._waiting), []
        if not events and not heal:
            return
        # A replica's id is already one of its incarnation: Serve gives a restarted replica another.
        open_ids = self.open_ids if heal else None
        batch = LifecycleBatch(self._replica_id, self._replica_id, self._seq, events, open_ids)
        self._seq += 1
        try:
            await self._send(batch)
        except Exception as error:  # any failure to reach an ingress is healed by the next open list
            if not self._failing:
                logger.warning("Life-cycle events did not reach an ingress; the next open list heals it: %s", error)
            self._failing = True
        else:
            self._failing = False
