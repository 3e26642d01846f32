"""Virtual time: a heap of events, and vLLM's wall-clock reads led to it.

All state is in one `VirtualClock`; an event is a plain call without arguments. Events at the same time run by priority,
then in the order in which they were planned, so a run is a function of its inputs alone.

The simulated parts get the time as an argument (`RoutingState`), as a method to override (`FairwayScheduler._now_s`) or
as a field (`Request.arrival_time`). vLLM reads the wall clock itself in a few places more, for statistics and event
stamps; `virtual_time` puts the virtual clock there, in those modules alone.
"""

import heapq
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from vllm import envs

Event = Callable[[], None]

VLLM_CLOCK_READERS = (
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.engine",
    "vllm.v1.request",
)
"""Modules on the simulated path that hold `time` as a global."""


@dataclass(slots=True)
class VirtualClock:
    """Time in seconds from 0, moved by the events alone."""

    now_s: float = 0.0
    _heap: list[tuple[float, int, int, Event]] = field(default_factory=list)
    _sequence: "count[int]" = field(default_factory=count)

    def at(self, time_s: float, event: Event, priority: int = 0) -> None:
        """Plan `event`; a smaller priority goes first among events of one time.

        Raises:
            ValueError: time_s is in the past, or not a number.
        """
        if not time_s >= self.now_s:
            raise ValueError(f"time_s is {time_s}; it must be at least now, {self.now_s}")
        heapq.heappush(self._heap, (time_s, priority, next(self._sequence), event))

    def run(self) -> None:
        """Run events in order until none is left."""
        while self._heap:
            self.now_s, _, _, event = heapq.heappop(self._heap)
            event()


class _VirtualTimeModule:
    """What vLLM uses of the `time` module, on the virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def time(self) -> float:
        return self._clock.now_s

    def monotonic(self) -> float:
        return self._clock.now_s

    def monotonic_ns(self) -> int:
        return round(self._clock.now_s * 1e9)


@contextmanager
def virtual_time(clock: VirtualClock) -> Iterator[None]:
    """Within it, vLLM's scheduler, requests and KV cache manager read `clock` instead of the wall clock.

    They also read their environment once instead of once a KV block, as an engine does after its start.
    """
    modules = [importlib.import_module(name) for name in VLLM_CLOCK_READERS]
    originals = [module.__dict__["time"] for module in modules]
    replacement = _VirtualTimeModule(clock)
    for module in modules:
        module.__dict__["time"] = replacement
    try:
        with _environment_read_once():
            yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.__dict__["time"] = original


@contextmanager
def _environment_read_once() -> Iterator[None]:
    was_cached = envs._is_envs_cache_enabled()
    envs.enable_envs_cache()
    try:
        yield
    finally:
        if not was_cached:
            envs.disable_envs_cache()
