"""Workloads share exactly what they are said to share, and come at the rate that they are said to come at."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from serve_app.sim.arrivals import Arrival, FloodParams, GspOrder, GspParams, at_once, flood, gsp

GSP = GspParams(num_groups=6, prompts_per_group=5, prompt_tokens=(40, 80), rate_per_s=10.0)
FLOOD = FloodParams(
    num_misses=3, miss_tokens=50, hit_prefix_tokens=64, hit_tokens=8, rate_per_s=5.0, duration_s=10.0, lead_s=2.0
)


def common_prefix(one: Arrival, other: Arrival) -> int:
    shared = 0
    for left, right in zip(one.prompt.tolist(), other.prompt.tolist(), strict=False):
        if left != right:
            break
        shared += 1
    return shared


def as_values(arrivals: list[Arrival]) -> list[tuple[Any, ...]]:
    return [(one.at_s, one.request_id, one.prompt.tolist(), one.output_tokens, one.phase) for one in arrivals]


@pytest.mark.parametrize(("generator", "params"), [(gsp, GSP), (flood, FLOOD)])
def test_same_seed_gives_the_same_arrivals_and_another_seed_others(generator: Any, params: Any) -> None:
    first, again, other = (as_values(generator(params, np.random.default_rng(seed))) for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize(("generator", "params"), [(gsp, GSP), (flood, FLOOD)])
def test_arrivals_are_in_order_and_ids_unique(generator: Any, params: Any) -> None:
    arrivals = generator(params, np.random.default_rng(1))
    times_s = [one.at_s for one in arrivals]
    assert times_s == sorted(times_s)
    assert len({one.request_id for one in arrivals}) == len(arrivals)


def test_gsp_prompts_share_half_within_their_group_and_nothing_beyond() -> None:
    arrivals = gsp(GSP, np.random.default_rng(3))
    assert len(arrivals) == 30
    assert sorted({len(one.prompt) for one in arrivals}) == [40, 80]
    for one in arrivals:
        shared = sorted(common_prefix(one, other) for other in arrivals if other is not one)
        assert shared == [0] * 25 + [len(one.prompt) // 2] * 4


def test_gsp_order_is_random() -> None:
    arrivals = gsp(GSP, np.random.default_rng(3))
    lengths = [len(one.prompt) for one in arrivals]
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))


def groups_in_order(order: Any) -> list[int]:
    """The group of each arrival, numbered by first appearance."""
    arrivals = gsp(replace(GSP, order=order), np.random.default_rng(3))
    starts = [tuple(one.prompt[:20].tolist()) for one in arrivals]
    known = list(dict.fromkeys(starts))
    return [known.index(start) for start in starts]


def test_grouped_gsp_has_all_prompts_of_a_group_in_a_row() -> None:
    assert groups_in_order("grouped") == [group for group in range(6) for _ in range(5)]


def test_round_robin_gsp_has_one_prompt_of_each_group_in_turn() -> None:
    assert groups_in_order("round-robin") == [group for _ in range(5) for group in range(6)]


def test_gsp_orders_have_the_same_prompts() -> None:
    prompts = [
        sorted(one.prompt.tolist() for one in gsp(replace(GSP, order=order), np.random.default_rng(3)))
        for order in get_args(GspOrder)
    ]
    assert prompts[0] == prompts[1] == prompts[2]


def test_ideal_hit_rate_is_what_an_endless_cache_would_hit() -> None:
    arrivals = gsp(GSP, np.random.default_rng(3))
    seen: list[Arrival] = []
    hit_tokens = 0
    for one in arrivals:
        hit_tokens += max((common_prefix(one, other) for other in seen), default=0)
        seen.append(one)
    assert hit_tokens / sum(len(one.prompt) for one in arrivals) == pytest.approx(GSP.ideal_hit_rate)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    arrivals = gsp(replace(GSP, num_groups=100, prompts_per_group=40), np.random.default_rng(5))
    gaps_s = np.diff([one.at_s for one in arrivals])
    assert np.mean(gaps_s) == pytest.approx(0.1, rel=0.05)
    assert np.std(gaps_s) == pytest.approx(0.1, rel=0.05)


def test_flood_is_a_lead_then_a_backlog_then_hits_on_the_leads_prefix() -> None:
    arrivals = flood(FLOOD, np.random.default_rng(2))
    by_phase = {phase: [one for one in arrivals if one.phase == phase] for phase in ("lead", "miss", "hit")}
    (lead,), misses, hits = by_phase.values()
    assert [one.at_s for one in (lead, *misses)] == [0.0, 2.0, 2.0, 2.0]
    assert [common_prefix(lead, one) for one in misses] == [0, 0, 0]
    assert {(common_prefix(lead, one), len(one.prompt)) for one in hits} == {(64, 72)}
    assert all(2.0 <= one.at_s <= 12.0 for one in hits)
    assert len(hits) == pytest.approx(50, abs=25)


def test_flood_starts_its_hits_later_and_leaves_the_rest_alone() -> None:
    now, later = (flood(replace(FLOOD, start_s=start_s), np.random.default_rng(2)) for start_s in (0.0, 4.0))
    assert [one.request_id for one in later] == [one.request_id for one in now]
    moved_s = [after.at_s - before.at_s for before, after in zip(now, later, strict=True)]
    assert moved_s == pytest.approx([4.0 if one.phase == "hit" else 0.0 for one in now])


def test_at_once_keeps_requests_and_order_but_not_times_and_phases() -> None:
    arrivals = flood(FLOOD, np.random.default_rng(2))
    saturated = at_once(arrivals)
    assert [(one.request_id, one.output_tokens) for one in saturated] == [
        (one.request_id, one.output_tokens) for one in arrivals
    ]
    assert all(one.prompt is same.prompt for one, same in zip(saturated, arrivals, strict=True))
    assert {(one.at_s, one.phase) for one in saturated} == {(0.0, "all")}


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        (GSP, "order", "sorted"),
        (FLOOD, "start_s", -1.0),
        (GSP, "num_groups", 0),
        (GSP, "output_tokens", 0),
        (GSP, "prompt_tokens", (1,)),
        (GSP, "prompt_tokens", ()),
        (GSP, "shared_share", 1.1),
        (GSP, "rate_per_s", 0.0),
        (FLOOD, "hit_tokens", 0),
        (FLOOD, "duration_s", float("inf")),
    ],
)
def test_parameter_out_of_range_is_refused_by_name(params: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(params, **{field: value})
