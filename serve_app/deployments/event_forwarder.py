"""One replica's life-cycle events on their way to every ingress: batched, numbered, healed.

`report` only appends; one task sends. While a broadcast is under way the next batch gathers, so a slow ingress costs
batching, not requests; one that doesn't answer at all holds the others' batches up by `patience_s`, no more. Every
second the ids of all open requests go along: an ingress that lost a batch, or routed a request that never arrived,
releases what its replica does not know of. With every batch go the engine's own figures, which `EngineLoad` gathers.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from serve_app.router.lifecycle import Closed, EngineReport, LifecycleBatch, LifecycleEvent, Opened

logger = logging.getLogger("ray.serve")

Send = Callable[[LifecycleBatch], Awaitable[None]]

MAX_EVENTS_KEPT = 10_000
"""Bound of events that wait while no ingress can be reached; the oldest go first and the open list heals the rest."""

DRAIN_POLL_S = 0.05


class EventForwarder:
    """Owns the replica's open requests and its sequence numbers."""

    def __init__(
        self,
        replica_id: str,
        send: Send,
        heal_every_s: float = 1.0,
        patience_s: float = 0.25,
        engine_report: Callable[[bool], EngineReport | None] = lambda is_idle: None,
    ) -> None:
        """Args: engine_report: the engine's figures; it is told whether no request is open here."""
        self._replica_id = replica_id
        self._send = send
        self._heal_every_s = heal_every_s
        self._patience_s = patience_s
        self._engine_report = engine_report
        self._waiting: list[LifecycleEvent] = []
        self._wake = asyncio.Event()
        self._open: set[str] = set()
        self._queued_s: dict[str, float] = {}
        self._seq = 0
        self._failing = False
        self._task: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin sending on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop sending; what still waits is lost, and healed by the departure of this replica."""
        tasks = [*self._under_way, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

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

    async def drained(self) -> None:
        """Return once no request is open and every event has been taken over by the ingresses, or was lost."""
        while self._open or self._waiting or self._under_way:  # noqa: ASYNC110  # asked for once in a process' life
            await asyncio.sleep(DRAIN_POLL_S)

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
        """Send what waits; returns when every ingress has it, or after `patience_s`."""
        events, self._waiting = tuple(self._waiting), []
        if not events and not heal:
            return
        # A replica's id is already one of its incarnation: Serve gives a restarted replica another.
        open_ids = self.open_ids if heal else None
        report = self._engine_report(not self._open)
        batch = LifecycleBatch(self._replica_id, self._replica_id, self._seq, events, open_ids, report)
        self._seq += 1
        sending = asyncio.get_running_loop().create_task(self._send_one(batch))
        self._under_way.add(sending)
        sending.add_done_callback(self._under_way.discard)
        await asyncio.wait({sending}, timeout=self._patience_s)

    async def _send_one(self, batch: LifecycleBatch) -> None:
        try:
            await self._send(batch)
        except Exception as error:  # any failure to reach an ingress is healed by the next open list
            if not self._failing:
                logger.warning("Life-cycle events did not reach an ingress; the next open list heals it: %s", error)
            self._failing = True
        else:
            self._failing = False


class EngineLoad:
    """The engine's figures in the process in front of it, at no cost to the engine while nothing waits.

    vLLM's own counts come with every step. The tokens that wait have to be asked for, at most every `ask_every_s` and
    only after a step that left somebody waiting: the engine answers between two steps.
    """

    def __init__(
        self,
        ask_queued_tokens: Callable[[], Awaitable[int]],
        ask_every_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: ask_queued_tokens: what the engine says; when it raises, it is not asked again and nothing reported."""
        self._ask_queued_tokens = ask_queued_tokens
        self._ask_every_s = ask_every_s
        self._clock = clock
        self._running = self._waiting = self._queued_tokens = 0
        self._counted_at_s: float | None = None
        self._queued_at_s = self._ask_at_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._is_dead = False

    def counted(self, running: int, waiting: int) -> None:
        """The engine ended a step with so many sequences; called in the running loop."""
        self._running, self._waiting, self._counted_at_s = running, waiting, self._clock()
        if not waiting:
            self._queued_tokens, self._queued_at_s = 0, self._counted_at_s
        elif self._asking is None and not self._is_dead and self._counted_at_s >= self._ask_at_s:
            self._ask_at_s = self._counted_at_s + self._ask_every_s
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    def report(self, is_idle: bool) -> EngineReport | None:
        """The newest figures; None before the first step. An idle engine takes no steps, and its zeros stay true."""
        if self._counted_at_s is None or self._is_dead or self._queued_at_s == float("-inf"):
            return None
        is_settled = is_idle and not self._running and not self._waiting
        age_s = 0.0 if is_settled else self._clock() - min(self._counted_at_s, self._queued_at_s)
        return EngineReport(self._queued_tokens, self._running, self._waiting, age_s)

    async def _ask(self) -> None:
        try:
            tokens = await self._ask_queued_tokens()
        except Exception as error:  # not our scheduler, or the engine is dead: Serve replaces that one
            logger.info("The engine's queue is not reported from now on: %s", error)
            self._is_dead = True
        else:
            if self._waiting:
                self._queued_tokens, self._queued_at_s = tokens, self._clock()
        finally:
            self._asking = None
