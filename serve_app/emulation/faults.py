"""Faults of the emulated GPU: which one is in force at an engine step, and what it does to the step's duration.

    in force at a step = the crash, once it has begun; else the fault that began last and is not over; else none
    slow: factor * duration        hang: duration + hang_s        crash: the step and all later ones fail

Steps that run tokens count, from 1, since the engine's start; the same settings and steps give the same faults.
Source: our own; a GPU's failures as engines and routers see them, hence shared by wall clock and virtual time.
Cost: O(faults) a step.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from serve_app.settings import Settings

MAX_STEP = 1_000_000_000

FirstStep = Annotated[int, Field(ge=1, le=MAX_STEP)]
NumSteps = Annotated[int, Field(ge=1, le=MAX_STEP)]


class CrashFault(Settings):
    """The step fails as by a CUDA error, and the engine with it; a restarted engine counts from 1 and crashes again."""

    kind: Literal["crash"]
    at_step: FirstStep
    """Engine step that fails. A replica's warm-up comes first and runs 4 steps."""


class HangFault(Settings):
    """The steps' results stay away although the process lives."""

    kind: Literal["hang"]
    at_step: FirstStep
    """First engine step that hangs."""
    for_steps: NumSteps | None = None
    """Engine steps that hang, one after the other; null: this one and every later one."""
    hang_s: float = Field(default=600.0, gt=0, le=3_600, allow_inf_nan=False)
    """Seconds by which each result is late, whatever `time_scale`; finite, so an unwatched engine ends. A worker in
    a process of its own, as on vLLM's CPU build, is given up by vLLM after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300)."""


class SlowFault(Settings):
    """The steps take longer, as on a GPU that throttles."""

    kind: Literal["slow"]
    at_step: FirstStep
    """First engine step that is slow."""
    for_steps: NumSteps | None = None
    """Engine steps that are slow, one after the other; null: this one and every later one."""
    factor: float = Field(gt=1, le=1_000, allow_inf_nan=False)
    """A slow step takes this many times as long."""


Fault = Annotated[CrashFault | HangFault | SlowFault, Field(discriminator="kind")]


def _begin_apart(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    steps = [fault.at_step for fault in faults]
    shared = sorted({step for step in steps if steps.count(step) > 1})
    if shared:
        raise ValueError(f"at_step={shared[0]} begins more than one fault; each must begin at a step of its own")
    return faults


Faults = Annotated[tuple[Fault, ...], Field(max_length=100), AfterValidator(_begin_apart)]


def fault_at(faults: Iterable[Fault], step: int) -> Fault | None:
    """The fault in force at this step, from 1; a later one interrupts an earlier one, and nothing follows a crash."""
    begun = [fault for fault in faults if fault.at_step <= step and not _is_over(fault, step)]
    return max(begun, key=lambda fault: (isinstance(fault, CrashFault), fault.at_step), default=None)


def delayed_s(fault: HangFault | SlowFault, duration_s: float) -> float:
    """Seconds until a step's result comes that would take `duration_s` without the fault."""
    return duration_s * fault.factor if isinstance(fault, SlowFault) else duration_s + fault.hang_s


def _is_over(fault: Fault, step: int) -> bool:
    return not isinstance(fault, CrashFault) and fault.for_steps is not None and step >= fault.at_step + fault.for_steps
