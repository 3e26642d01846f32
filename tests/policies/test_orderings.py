"""Orderings checked by hand; what holds for all of them is in test_ordering_contract."""

from types import ModuleType

import pytest

import serve_app.policies
from serve_app.policies import ORDERINGS, FairwayParams
from serve_app.policies.taking_turns import k_lpm
from tests.policies.test_fairway import queue_of

PARAMS = FairwayParams()


def order(name: str, *requests: tuple[int, int, float, float, float]) -> list[int]:
    return [int(index) for index in ORDERINGS[name](PARAMS, *queue_of(*requests))]


def test_scores_disagree_where_their_formulas_say_so() -> None:
    long_hit = (8_000, 4_000, 0.0, 1.2, 3.0)  # h = 8,000, h/c = 2, saves 0.8 s
    short_hit = (900, 100, 0.0, 0.1, 2.0)  # h = 900, h/c = 9, saves 0.09 s
    slow_hit = (3_000, 3_000, 0.0, 2.0, 1.0)  # h = 3,000, h/c = 1, saves 1.0 s
    requests = (long_hit, short_hit, slow_hit)
    assert order("fcfs", *requests) == [2, 1, 0]
    assert order("lpm", *requests) == [0, 2, 1]
    assert order("ragcache", *requests) == [1, 0, 2]
    assert order("peek", *requests) == [2, 0, 1]


def test_absolute_wait_counts_seconds_and_relative_wait_counts_patience() -> None:
    patient = (0, 20_000, 5.0, 2.0, 0.0)  # waited 5 s, 5/6 of its patience
    impatient = (0, 1_000, 4.0, 0.1, 1.0)  # waited 4 s, 4 of its patience
    assert order("absolute-wait", patient, impatient) == [0, 1]
    assert order("relative-wait", patient, impatient) == [1, 0]


def test_k_lpm_serves_the_oldest_then_longer_prefixes_round_by_round() -> None:
    misses = [(0, 100, 1.0, 0.1, float(i)) for i in range(3)]
    hits = [(100 * i, 100, 0.0, 0.1, 10.0 + i) for i in range(1, 7)]
    assert order("k-lpm-4", *misses, *hits) == [0, 8, 7, 6, 1, 5, 4, 3, 2]
    assert order("k-lpm-8", *misses, *hits) == [0, 8, 7, 6, 5, 4, 3, 1, 2]


def test_k_lpm_of_one_is_fcfs_and_less_is_refused() -> None:
    queue = queue_of((0, 9, 0.0, 0.1, 2.0), (9, 9, 0.0, 0.1, 1.0), (5, 9, 0.0, 0.1, 3.0))
    assert k_lpm(1)(PARAMS, *queue).tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="k is 0; it must be at least 1"):
        k_lpm(0)


def test_preble_gives_a_group_ten_requests_a_round_for_each_tenth_of_its_hit_ratio() -> None:
    high, low = (95, 5), (5, 95)  # hit ratios 0.95, group 10, and 0.05, group 1
    requests = [(*low, 0.0, 0.1, float(i)) for i in range(25)] + [(*high, 0.0, 0.1, float(i)) for i in range(205)]
    group_10 = [25 + i for i in range(205)]
    expected = [*group_10[:100], *range(10), *group_10[100:200], *range(10, 20), *group_10[200:], *range(20, 25)]
    assert order("preble", *requests) == expected


def test_preble_puts_a_ratio_on_the_border_into_the_higher_group() -> None:
    border, below = (500, 500, 0.0, 0.1, 1.0), (499, 501, 0.0, 0.1, 0.0)
    assert order("preble", below, border) == [1, 0]


def test_package_exports_exactly_what_it_lists() -> None:
    public = {name for name, value in vars(serve_app.policies).items() if not isinstance(value, ModuleType)}
    assert {name for name in public if not name.startswith("_")} == set(serve_app.policies.__all__)
