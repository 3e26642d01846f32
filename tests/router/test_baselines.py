"""Every routing rule under one contract, and what sets each apart."""

import math
import random
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest

from serve_app.config import RoutingDocument, RoutingWeights
from serve_app.router.baselines import (
    HISTORY_RULES,
    PUBLISHED_WEIGHTS,
    RULES,
    least_work,
    lmetric,
    power_of_two,
    round_robin,
)
from serve_app.router.choice import ReplicaView, predict_terms
from serve_app.router.load import LoadLedger
from tests.router.rule_views import first_picks, random_views

WEIGHTS = RoutingWeights()
ONLY_LOAD = sorted(RULES.keys() - HISTORY_RULES)


def views_with_open(*num_open: int) -> list[ReplicaView]:
    return [ReplicaView(f"{i}", 0, 100, 0, 0.01, 0.0, 0.1 * n, 0.0, 0.0, n) for i, n in enumerate(num_open)]


def ids(views: list[ReplicaView], name: str, seed: float = 0) -> list[str]:
    return [terms.replica_id for terms in RULES[name](WEIGHTS, views, random.Random(seed), 0)]


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


@pytest.mark.parametrize("name", RULES)
def test_rule_ranks_any_candidates_once_and_repeats_with_its_seed(name: str) -> None:
    for views, rng in random_views(seed=1, count=200):
        seed = rng.random()
        ranked = ids(views, name, seed)
        assert sorted(ranked) == sorted(view.replica_id for view in views)
        assert ranked == ids(views, name, seed)


@pytest.mark.parametrize("name", ONLY_LOAD)
def test_rule_that_keeps_no_history_does_not_look_at_it(name: str) -> None:
    for views, _ in random_views(seed=2, count=200):
        without = [replace(view, routed_tokens=0, history_blocks=0, home_order=0) for view in views]
        assert ids(views, name) == ids(without, name)


@pytest.mark.parametrize("name", sorted(HISTORY_RULES))
def test_rule_that_keeps_history_follows_it(name: str) -> None:
    views = views_with_open(0, 0, 0)
    for home in range(3):
        known = [replace(view, routed_tokens=96 if i == home else 0) for i, view in enumerate(views)]
        assert ids(known, name)[0] == f"{home}"


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


def test_least_work_ranks_by_assigned_seconds_alone() -> None:
    for views, rng in random_views(seed=3, count=300):
        queue_s = {view.replica_id: view.queue_s for view in views}
        ranked = [queue_s[one.replica_id] for one in least_work(WEIGHTS, views, rng, 0)]
        assert ranked == sorted(queue_s.values())


def test_lmetric_ranks_by_miss_tokens_times_batch_size() -> None:
    for views, rng in random_views(seed=4, count=300):
        score = {view.replica_id: view.miss_tokens * view.num_open + view.miss_tokens for view in views}
        ranked = [score[one.replica_id] for one in lmetric(WEIGHTS, views, rng, 0)]
        assert ranked == sorted(score.values())


def test_lmetric_leaves_the_warm_replica_when_its_batch_is_longer_than_its_hit_is_worth() -> None:
    home, away = views_with_open(3, 0)
    for hit_tokens, first in ((70, "1"), (80, "0")):  # 4 x 30 against 1 x 100, 4 x 20 against 1 x 100
        warm = replace(home, hit_tokens=hit_tokens, miss_tokens=100 - hit_tokens)
        assert ids([warm, away], "lmetric")[0] == first


@pytest.mark.parametrize("name", ["least-work", "lmetric", "cache-aware-0.5"])
def test_ties_are_broken_evenly_at_random(name: str) -> None:
    views, rng = views_with_open(1, 1, 1), random.Random(0)
    picks = Counter(RULES[name](WEIGHTS, views, rng, 0)[0].replica_id for _ in range(3_000))
    assert min(picks[f"{i}"] for i in range(3)) > 900


@pytest.mark.parametrize("name", ["lbgr-published", "prefix-affinity", "prefix-affinity-8"])
def test_ties_go_to_the_first_by_id_whatever_order_they_come_in(name: str) -> None:
    views = views_with_open(1, 1, 1)
    assert {ids(list(order), name, seed=i)[0] for i, order in enumerate([views, views[::-1]])} == {"0"}


def test_published_lbgr_takes_the_least_sum_of_miss_hit_and_load() -> None:
    for views, rng in random_views(seed=5, count=300):
        ranked = RULES["lbgr-published"](PUBLISHED_WEIGHTS["lbgr-published"], views, rng, 0)
        cost_s = {view.replica_id: view.miss_s + view.hit_s + view.queue_s for view in views}
        assert [one.total_s for one in ranked] == [cost_s[one.replica_id] for one in ranked] == sorted(cost_s.values())
        assert ranked[0].replica_id == min(first_picks(views, lambda view: view.miss_s + view.hit_s + view.queue_s))


def test_published_lbgr_has_neither_a_price_of_home_nor_a_regression() -> None:
    near, far = views_with_open(0, 0)
    far = replace(far, miss_s=0.009, affinity_s=9.0, residual_s=9.0)
    assert ids([near, far], "lbgr-published") == ["1", "0"]
    assert ids([near, far], "lbgr") == ["0", "1"]


def test_published_load_keeps_31_of_32_parts_every_20_ms() -> None:
    half_life_s = PUBLISHED_WEIGHTS["lbgr-published"].load_half_life_s
    assert half_life_s == pytest.approx(0.4366, abs=5e-5)
    ledger = LoadLedger(half_life_s)
    ledger.reserve("r", "a", 1.0, 0.0)
    kept = 1.0
    for tick in range(1, 51):
        kept *= 31 / 32
        assert math.isclose(ledger.load_s("a", 0.02 * tick), kept, rel_tol=1e-9)


def test_only_rules_that_exist_are_said_to_need_history_or_weights() -> None:
    assert HISTORY_RULES | PUBLISHED_WEIGHTS.keys() <= RULES.keys()
