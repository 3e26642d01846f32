"""One contract for every ordering, and what each alone promises."""

from types import ModuleType
from typing import get_args

import numpy as np
import pytest

import serve_app.policies
from serve_app.config import EnginePolicy
from serve_app.policies import ORDERINGS, FairwayParams, Ordering, fcfs, lpm, order_within_classes
from tests.policies.test_fairway import Queue, queue_of, random_queue

each_ordering = pytest.mark.parametrize("ordering", ORDERINGS.values(), ids=ORDERINGS)
PARAMS = FairwayParams()


def empty_queue() -> Queue:
    ints, floats = np.empty(0, dtype=np.int64), np.empty(0)
    return ints, ints, floats, floats, floats


@each_ordering
def test_order_is_a_permutation_and_repeats_itself(ordering: Ordering) -> None:
    rng = np.random.default_rng(3)
    for n in range(1, 40):
        queue = random_queue(rng, n)
        order = ordering(PARAMS, *queue)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(n))
        assert order.tolist() == ordering(PARAMS, *queue).tolist()


@each_ordering
def test_inputs_are_left_as_they_were(ordering: Ordering) -> None:
    queue = random_queue(np.random.default_rng(4), 50)
    before = [column.copy() for column in queue]
    for column in queue:
        column.flags.writeable = False
    ordering(PARAMS, *queue)
    assert all((column == old).all() for column, old in zip(queue, before, strict=True))


@each_ordering
def test_empty_and_single_queues_are_ordered(ordering: Ordering) -> None:
    assert ordering(PARAMS, *empty_queue()).tolist() == []
    assert ordering(PARAMS, *queue_of((1, 2, 0.5, 0.1, 3.0))).tolist() == [0]


@each_ordering
def test_equal_requests_go_by_arrival_then_by_index(ordering: Ordering) -> None:
    same = (10, 10, 1.0, 0.1)
    queue = queue_of((*same, 5.0), (*same, 4.0), (*same, 5.0), (*same, 4.0))
    assert ordering(PARAMS, *queue).tolist() == [1, 3, 0, 2]


@each_ordering
def test_priority_is_the_outer_order_and_the_ordering_holds_within(ordering: Ordering) -> None:
    rng = np.random.default_rng(5)
    for n in range(30):
        queue = random_queue(rng, n)
        priority = rng.integers(-2, 3, size=n)
        order = order_within_classes(ordering, PARAMS, priority, *queue)
        assert sorted(order.tolist()) == list(range(n))
        assert priority[order].tolist() == sorted(priority.tolist())
        for one in np.unique(priority):
            members = np.flatnonzero(priority == one)
            hit, todo, waited, prefill, arrival = queue
            columns = hit[members], todo[members], waited[members], prefill[members], arrival[members]
            assert order[priority[order] == one].tolist() == members[ordering(PARAMS, *columns)].tolist()


def test_fcfs_goes_by_arrival() -> None:
    hit, todo, waited, prefill, arrival = random_queue(np.random.default_rng(6), 60)
    order = fcfs(PARAMS, hit, todo, waited, prefill, arrival).tolist()
    assert order == sorted(range(60), key=lambda i: (arrival[i], i))


def test_lpm_goes_by_cached_tokens() -> None:
    hit, todo, waited, prefill, arrival = random_queue(np.random.default_rng(7), 60)
    order = lpm(PARAMS, hit, todo, waited, prefill, arrival).tolist()
    assert order == sorted(range(60), key=lambda i: (-hit[i], arrival[i], i))


def test_every_ordering_of_the_settings_exists_and_no_other() -> None:
    assert set(ORDERINGS) == set(get_args(EnginePolicy.model_fields["ordering"].annotation))


def test_package_exports_exactly_what_it_lists() -> None:
    public = {name for name, value in vars(serve_app.policies).items() if not isinstance(value, ModuleType)}
    assert {name for name in public if not name.startswith("_")} == set(serve_app.policies.__all__)
