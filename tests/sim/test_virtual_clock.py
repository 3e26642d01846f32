"""The clock's order of events, and where vLLM is led to it."""

import importlib
import math
import time

import pytest

from serve_app.sim.clock import VLLM_CLOCK_READERS, VirtualClock, virtual_time


def test_events_run_by_time_then_priority_then_order_of_planning() -> None:
    clock = VirtualClock()
    log: list[tuple[float, str]] = []

    def note(name: str) -> None:
        log.append((clock.now_s, name))

    clock.at(2.0, lambda: note("late"))
    clock.at(1.0, lambda: note("second"), priority=1)
    clock.at(1.0, lambda: note("third"), priority=1)
    clock.at(1.0, lambda: note("first"), priority=0)
    clock.at(0.0, lambda: clock.at(0.0, lambda: note("planned at once")))
    clock.run()
    assert log == [(0.0, "planned at once"), (1.0, "first"), (1.0, "second"), (1.0, "third"), (2.0, "late")]
    assert clock.now_s == 2.0


@pytest.mark.parametrize("time_s", [4.9, -1.0, math.nan])
def test_event_in_the_past_is_refused(time_s: float) -> None:
    with pytest.raises(ValueError, match="time_s"):
        VirtualClock(now_s=5.0).at(time_s, lambda: None)


def test_vllm_reads_the_virtual_clock_within_the_context_only() -> None:
    clock = VirtualClock(now_s=12.5)
    modules = [importlib.import_module(name) for name in VLLM_CLOCK_READERS]
    with virtual_time(clock):
        for module in modules:
            assert (module.time.time(), module.time.monotonic()) == (12.5, 12.5)
            assert module.time.monotonic_ns() == 12_500_000_000
    assert all(module.time is time for module in modules)


def test_vllm_gets_its_own_clock_back_after_an_error() -> None:
    clock = VirtualClock()

    def fail() -> None:
        raise RuntimeError("an event failed")

    clock.at(0.0, fail)
    with pytest.raises(RuntimeError, match="an event failed"), virtual_time(clock):
        clock.run()
    assert all(importlib.import_module(name).time is time for name in VLLM_CLOCK_READERS)
