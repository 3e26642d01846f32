"""Requests come when their phase says, at its rate, and each family gets its phases' names."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serve_app.sim.draws import TokenArray
from serve_app.sim.workloads import (
    FAMILIES,
    DynamicParams,
    Replayed,
    SaturatedParams,
    SteadyParams,
    WeakSpotParams,
    dynamic,
    saturated,
    steady,
)

SMALL = WeakSpotParams(num_groups=2, prompt_tokens=(4, 8))
DYNAMIC = DynamicParams(SMALL, (10.0, 20.0, 40.0), (50.0, 40.0, 30.0))


class PhasesSeen:
    """A family that remembers what it was asked for."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        self.phases = list(phases)
        return [np.zeros(1, dtype=np.int32) for _ in phases]


def as_values(arrivals: Any) -> list[tuple[Any, ...]]:
    return [(one.at_s, one.request_id, one.prompt.tolist(), one.output_tokens, one.phase) for one in arrivals]


def test_dynamic_phases_lie_one_after_the_other_at_their_rates() -> None:
    arrivals = dynamic(DYNAMIC, np.random.default_rng(1))
    times_s = [one.at_s for one in arrivals]
    assert times_s == sorted(times_s)
    for phase, begin_s, end_s, mean in (("calm", 0, 50, 500), ("burst", 50, 90, 800), ("spike", 90, 120, 1_200)):
        own_s = [one.at_s for one in arrivals if one.phase == phase]
        assert begin_s <= min(own_s)
        assert max(own_s) < end_s
        assert len(own_s) == pytest.approx(mean, abs=4 * mean**0.5)


def test_dynamic_lasts_ten_minutes_by_default() -> None:
    arrivals = dynamic(
        replace(DYNAMIC, rates_per_s=(1.0, 1.0, 9.0), durations_s=DynamicParams(SMALL, (1, 1, 1)).durations_s),
        np.random.default_rng(1),
    )
    assert 590.0 < arrivals[-1].at_s < 600.0


def test_gaps_within_a_phase_are_exponential() -> None:
    arrivals = dynamic(replace(DYNAMIC, rates_per_s=(100.0, 1.0, 1.0)), np.random.default_rng(2))
    gaps_s = np.diff([one.at_s for one in arrivals if one.phase == "calm"])
    assert np.mean(gaps_s) == pytest.approx(0.01, rel=0.05)
    assert np.std(gaps_s) == pytest.approx(0.01, rel=0.05)


def test_family_is_told_the_phase_of_each_request() -> None:
    family = PhasesSeen()
    arrivals = dynamic(replace(DYNAMIC, family=family), np.random.default_rng(1))
    assert family.phases == [one.phase for one in arrivals]
    steady(SteadyParams(family, 5.0, 10.0, mix="spike"), np.random.default_rng(1))
    assert set(family.phases) == {"spike"}
    saturated(SaturatedParams(family, 7, mix="burst"), np.random.default_rng(1))
    assert family.phases == ["burst"] * 7


def test_steady_rate_is_the_rate_asked_for() -> None:
    arrivals = steady(SteadyParams(SMALL, 20.0, 100.0), np.random.default_rng(3))
    assert len(arrivals) == pytest.approx(2_000, abs=180)
    assert max(one.at_s for one in arrivals) < 100.0
    assert {one.phase for one in arrivals} == {"all"}


def test_saturated_requests_all_come_at_once() -> None:
    arrivals = saturated(SaturatedParams(SMALL, 9, output_tokens=3), np.random.default_rng(3))
    assert [(one.at_s, one.phase, one.output_tokens) for one in arrivals] == [(0.0, "all", 3)] * 9


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_repeats_by_seed_and_has_unique_ids(family: str) -> None:
    params = DynamicParams(FAMILIES[family], (1.0, 2.0, 3.0), (5.0, 4.0, 3.0))
    first, again, other = (as_values(dynamic(params, np.random.default_rng(seed))) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert len({one[1] for one in first}) == len(first)


def test_replayed_prompts_keep_their_order_and_run_out_loudly() -> None:
    given = [np.full(size, size, dtype=np.int32) for size in (3, 1, 2)]
    arrivals = saturated(SaturatedParams(Replayed(given), 2), np.random.default_rng(0))
    assert [one.prompt.tolist() for one in arrivals] == [[3, 3, 3], [1]]
    with pytest.raises(ValueError, match="4 requests are asked for; given has 3"):
        saturated(SaturatedParams(Replayed(given), 4), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        (DYNAMIC, "rates_per_s", (1.0, 0.0, 1.0)),
        (DYNAMIC, "durations_s", (1.0, 1.0)),
        (DYNAMIC, "output_tokens", 0),
        (SteadyParams(SMALL, 1.0), "rate_per_s", 0.0),
        (SteadyParams(SMALL, 1.0), "duration_s", float("nan")),
        (SteadyParams(SMALL, 1.0), "mix", "drain"),
        (SaturatedParams(SMALL, 1), "num_requests", 0),
        (SaturatedParams(SMALL, 1), "mix", "all"),
    ],
)
def test_parameter_out_of_range_is_refused_by_name(params: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(params, **{field: value})
