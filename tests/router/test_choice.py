"""LBGR's formula by hand, and the laws of a ranking."""

import random
from collections import Counter

import pytest

from serve_app.config import RoutingWeights
from serve_app.router.choice import ReplicaView, affinity_cost_s, predict_terms, rank

WEIGHTS = RoutingWeights(miss=2.0, hit=3.0, queue=4.0, affinity=2.5, affinity_load=1.0, residual=6.0)


def view(replica_id: str = "a", **changes: float) -> ReplicaView:
    numbers: dict[str, float] = {
        "hit_tokens": 0,
        "miss_tokens": 100,
        "elsewhere_tokens": 0,
        "miss_s": 0.1,
        "hit_s": 0.0,
        "queue_s": 0.0,
        "affinity_s": 0.0,
        "residual_s": 0.0,
        "num_open": 0,
    }
    return ReplicaView(replica_id=replica_id, **(numbers | changes))  # type: ignore[arg-type]  # counts are whole


def test_cost_is_the_weighted_sum_and_prediction_the_plain_one_without_the_price() -> None:
    terms = predict_terms(
        WEIGHTS,
        view(
            hit_tokens=7,
            miss_s=1.0,
            hit_s=0.5,
            queue_s=0.25,
            affinity_s=8.0,
            residual_s=-0.125,
            pressure=0.5,
        ),
    )
    assert (terms.miss_s, terms.hit_s, terms.queue_s, terms.affinity_s) == (2.0, 1.5, 1.0, 24.0)
    assert terms.residual_s == -0.75
    assert terms.total_s == 27.75
    assert terms.predicted_s == 1.625
    assert (terms.replica_id, terms.hit_tokens) == ("a", 7)


def test_prediction_is_never_below_zero() -> None:
    assert predict_terms(WEIGHTS, view(residual_s=-1.0)).predicted_s == 0.0
    assert predict_terms(WEIGHTS, view(residual_s=-1.0)).total_s < 0


def test_prefix_stays_at_its_home_until_the_queue_there_costs_more_than_the_price() -> None:
    weights = RoutingWeights(affinity=2.0)
    away = view("away", miss_s=1.0, affinity_s=0.9)
    for queue_s, first in ((2.6, "home"), (2.8, "away")):
        home = view("home", miss_s=0.1, queue_s=queue_s)
        assert rank(weights, [away, home], random.Random(0))[0].replica_id == first


@pytest.mark.parametrize("seed", range(5))
def test_ranking_is_a_sorted_permutation_and_repeats_with_its_seed(seed: int) -> None:
    rng = random.Random(seed)
    views = [view(f"{i}", miss_s=rng.random(), queue_s=rng.choice([0.0, 1.0])) for i in range(rng.randrange(1, 12))]
    ranked = rank(WEIGHTS, views, random.Random(seed))
    assert sorted(terms.replica_id for terms in ranked) == sorted(one.replica_id for one in views)
    assert [terms.total_s for terms in ranked] == sorted(predict_terms(WEIGHTS, one).total_s for one in views)
    assert ranked == rank(WEIGHTS, views, random.Random(seed))


def test_exact_ties_are_broken_evenly_at_random() -> None:
    rng, views = random.Random(0), [view("a"), view("b"), view("c"), view("worse", miss_s=0.2)]
    firsts = Counter(rank(WEIGHTS, views, rng)[0].replica_id for _ in range(3_000))
    assert firsts.keys() == {"a", "b", "c"}
    assert min(firsts.values()) > 900


def test_nothing_to_rank_ranks_to_nothing() -> None:
    assert rank(WEIGHTS, [], random.Random(0)) == []


def test_price_of_a_home_rises_with_pressure_up_to_its_bound() -> None:
    weights = RoutingWeights(affinity=1.0, affinity_load=0.1)
    costs_s = [affinity_cost_s(weights, view(affinity_s=2.0, pressure=pressure)) for pressure in (0.0, 10.0, 90.0)]
    assert costs_s == pytest.approx([2.0, 4.0, 20.0])
    away = view("away", miss_s=1.0, affinity_s=2.0, pressure=640.0, home_bound_s=5.0)
    assert affinity_cost_s(weights, away) == 5.0
    for queue_s, first in ((5.8, "home"), (6.0, "away")):
        home = view("home", queue_s=queue_s, home_bound_s=5.0)
        assert rank(weights, [home, away], random.Random(0))[0].replica_id == first


def test_share_that_explores_is_drawn_from_all_and_the_rest_is_ranked() -> None:
    views = [view("best"), *(view(name, queue_s=1.0) for name in "abc")]
    weights, rng = RoutingWeights(explore=0.4), random.Random(0)
    picks = Counter(rank(weights, views, rng)[0].replica_id for _ in range(4_000))
    assert picks["best"] / 4_000 == pytest.approx(0.6 + 0.4 / 4, abs=0.03)
    assert all(picks[name] / 4_000 == pytest.approx(0.1, abs=0.03) for name in "abc")
    assert {one.replica_id for one in rank(weights, views, rng)} == {"best", *"abc"}
