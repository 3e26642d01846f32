"""Which fault is in force at a step, against a slow reference, and what the settings refuse."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.emulation.faults import CrashFault, Fault, HangFault, SlowFault, delayed_s, fault_at
from serve_app.emulation.settings import EmulationSettings

STEPS = st.integers(1, 12)
LENGTHS = st.none() | st.integers(1, 6)
ONE_FAULT = (
    st.builds(CrashFault, kind=st.just("crash"), at_step=STEPS)
    | st.builds(HangFault, kind=st.just("hang"), at_step=STEPS, for_steps=LENGTHS)
    | st.builds(SlowFault, kind=st.just("slow"), at_step=STEPS, for_steps=LENGTHS, factor=st.just(2.0))
)
FAULTS = st.lists(ONE_FAULT, max_size=5, unique_by=lambda fault: fault.at_step)


def slow_faults_by_step(faults: list[Fault], last_step: int) -> list[Fault | None]:
    """Write each fault over its steps, the earliest first; only a crash overwrites a crash."""
    in_force: list[Fault | None] = [None] * (last_step + 1)
    for fault in sorted(faults, key=lambda fault: fault.at_step):
        length = None if isinstance(fault, CrashFault) else fault.for_steps
        for step in range(
            fault.at_step, last_step + 1 if length is None else min(last_step + 1, fault.at_step + length)
        ):
            if not isinstance(in_force[step], CrashFault) or isinstance(fault, CrashFault):
                in_force[step] = fault
    return in_force[1:]


@given(FAULTS)
def test_fault_in_force_equals_the_one_written_last_over_its_step(faults: list[Fault]) -> None:
    assert [fault_at(faults, step) for step in range(1, 21)] == slow_faults_by_step(faults, 20)


@given(FAULTS)
def test_order_of_the_list_does_not_matter(faults: list[Fault]) -> None:
    assert all(fault_at(faults, step) == fault_at(faults[::-1], step) for step in range(1, 21))


def test_short_hang_interrupts_a_lasting_slow_down() -> None:
    slow = SlowFault(kind="slow", at_step=2, factor=3.0)
    hang = HangFault(kind="hang", at_step=4, for_steps=1)
    assert [fault_at([slow, hang], step) for step in range(1, 6)] == [None, slow, slow, hang, slow]


def test_slow_step_is_multiplied_and_hung_step_is_late() -> None:
    assert delayed_s(SlowFault(kind="slow", at_step=1, factor=4.0), 0.25) == 1.0
    assert delayed_s(HangFault(kind="hang", at_step=1, hang_s=30.0), 0.25) == 30.25


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "crash", "at_step": 0}, r"faults\.0\.crash\.at_step=0: .*greater than or equal to 1"),
        ({"kind": "hang", "at_step": 1, "for_steps": 0}, r"faults\.0\.hang\.for_steps=0: .*greater than or equal to 1"),
        (
            {"kind": "hang", "at_step": 1, "hang_s": 4e3},
            r"faults\.0\.hang\.hang_s=4000\.0: .*less than or equal to 3600",
        ),
        ({"kind": "slow", "at_step": 1, "factor": 1}, r"faults\.0\.slow\.factor=1: .*greater than 1"),
        ({"kind": "slow", "at_step": 1}, r"faults\.0\.slow\.factor=.*Field required"),
        ({"kind": "crash", "at_step": 1, "for_steps": 2}, r"faults\.0\.crash\.for_steps=2: Extra inputs"),
        ({"kind": "melt", "at_step": 1}, r"faults\.0=.*'melt'.*'crash', 'hang', 'slow'"),
    ],
)
def test_bad_fault_is_named_with_value_and_bound(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulationSettings.from_section({"emulation": {"faults": [fault]}}, "emulation")


def test_two_faults_that_begin_at_one_step_are_refused() -> None:
    faults = [{"kind": "crash", "at_step": 7}, {"kind": "slow", "at_step": 7, "factor": 2}]
    with pytest.raises(ValueError, match=r"faults=.*at_step=7 begins more than one fault"):
        EmulationSettings.from_section({"emulation": {"faults": faults}}, "emulation")
