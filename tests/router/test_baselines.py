"""Every routing rule under one contract, and what sets each apart."""

import random
from collections import Counter
from typing import get_args

import pytest

from serve_app.config import RoutingDocument, RoutingWeights
from serve_app.router.baselines import RULES, power_of_two, round_robin
from serve_app.router.choice import ReplicaView, predict_terms

WEIGHTS = RoutingWeights()


def views_with_open(*num_open: int) -> list[ReplicaView]:
    return [ReplicaView(f"{i}", 0, 100, 0, 0.01, 0.0, 0.1 * n, 0.0, 0.0, n) for i, n in enumerate(num_open)]


def test_every_rule_of_the_document_is_there() -> None:
    assert set(RULES) == set(get_args(RoutingDocument.model_fields["router"].annotation))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_rule_ranks_every_candidate_once_with_its_terms_and_repeats_with_its_seed(name: str, count: int) -> None:
    views = views_with_open(*range(count))
    before = list(views)
    ranked = RULES[name](WEIGHTS, views, random.Random(1), 3)
    assert views == before
    assert sorted(ranked, key=lambda terms: terms.replica_id) == [predict_terms(WEIGHTS, view) for view in views]
    assert ranked == RULES[name](WEIGHTS, views, random.Random(1), 3)


def test_round_robin_takes_each_in_turn_whatever_order_they_come_in() -> None:
    rng, views = random.Random(0), views_with_open(5, 0, 0)
    picks = []
    for counter in range(6):
        rng.shuffle(views)
        picks.append(round_robin(WEIGHTS, views, rng, counter)[0].replica_id)
    assert picks == ["0", "1", "2", "0", "1", "2"]


def test_power_of_two_takes_the_emptier_of_any_two() -> None:
    rng, views = random.Random(0), views_with_open(0, 1, 2, 3)
    picks = Counter(power_of_two(WEIGHTS, views, rng, 0)[0].replica_id for _ in range(6_000))
    assert "3" not in picks
    for replica_id, pairs_won in (("0", 3), ("1", 2), ("2", 1)):  # of six pairs
        assert picks[replica_id] == pytest.approx(1_000 * pairs_won, rel=0.1)


def test_power_of_two_spreads_evenly_over_equals() -> None:
    rng, views = random.Random(0), views_with_open(1, 1, 1)
    picks = Counter(power_of_two(WEIGHTS, views, rng, 0)[0].replica_id for _ in range(3_000))
    assert min(picks.values()) > 900
