"""One contract for every ordering: what each promises, against slow, obvious references."""

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest

from serve_app.config import EnginePolicy
from serve_app.policies import ORDERINGS, ORDERINGS_BY_ARRIVAL_ALONE, FairwayParams, order_within_classes
from tests.policies.slow_references import slow_order
from tests.policies.test_fairway import Queue, queue_of, random_queue

each_ordering = pytest.mark.parametrize("name", ORDERINGS)
PARAMS = FairwayParams()


def empty_queue() -> Queue:
    ints, floats = np.empty(0, dtype=np.int64), np.empty(0)
    return ints, ints, floats, floats, floats


@each_ordering
def test_order_is_a_permutation_and_repeats_itself(name: str) -> None:
    rng = np.random.default_rng(3)
    for n in range(1, 40):
        queue = random_queue(rng, n)
        order = ORDERINGS[name](PARAMS, *queue)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(n))
        assert order.tolist() == ORDERINGS[name](PARAMS, *queue).tolist()


@each_ordering
def test_order_equals_the_slow_reference_on_random_queues(name: str) -> None:
    rng = np.random.default_rng(8)
    for round_number in range(120):
        weight, multiple, floor_s = rng.choice([1.0, 2.5, 4.0, 7.0], size=3)
        params = FairwayParams(float(weight), float(multiple), float(floor_s) / 4)
        # Some are longer than Preble's highest quota, so that its turns come round.
        queue = random_queue(rng, int(rng.integers(0, 30)) if round_number % 20 else 300)
        expected = slow_order(name, params, *(column.tolist() for column in queue))
        assert ORDERINGS[name](params, *queue).tolist() == expected


@each_ordering
def test_inputs_are_left_as_they_were(name: str) -> None:
    queue = random_queue(np.random.default_rng(4), 50)
    before = [column.copy() for column in queue]
    for column in queue:
        column.flags.writeable = False
    ORDERINGS[name](PARAMS, *queue)
    assert all((column == old).all() for column, old in zip(queue, before, strict=True))


@each_ordering
def test_empty_and_single_queues_are_ordered(name: str) -> None:
    empty = ORDERINGS[name](PARAMS, *empty_queue())
    assert empty.tolist() == []
    assert empty.dtype == np.int64
    assert ORDERINGS[name](PARAMS, *queue_of((1, 2, 0.5, 0.1, 3.0))).tolist() == [0]


@each_ordering
def test_equal_requests_go_by_arrival_then_by_index(name: str) -> None:
    same = (10, 10, 1.0, 0.1)
    queue = queue_of((*same, 5.0), (*same, 4.0), (*same, 5.0), (*same, 4.0))
    assert ORDERINGS[name](PARAMS, *queue).tolist() == [1, 3, 0, 2]


@each_ordering
def test_order_does_not_depend_on_the_place_in_the_queue_where_arrivals_differ(name: str) -> None:
    rng = np.random.default_rng(9)
    hit, todo, waited, prefill, _ = random_queue(rng, 60)
    arrival = rng.permutation(60) / 10
    m = rng.permutation(60)
    order = ORDERINGS[name](PARAMS, hit, todo, waited, prefill, arrival)
    shuffled_order = ORDERINGS[name](PARAMS, hit[m], todo[m], waited[m], prefill[m], arrival[m])
    assert m[shuffled_order].tolist() == order.tolist()


@each_ordering
def test_request_with_nothing_to_compute_is_ordered_without_a_division_by_zero(name: str) -> None:
    cached, cold = (500, 0, 0.0, 0.1, 1.0), (0, 0, 0.0, 0.0, 0.0)
    assert sorted(ORDERINGS[name](PARAMS, *queue_of(cached, cold)).tolist()) == [0, 1]


@each_ordering
def test_priority_is_the_outer_order_and_the_ordering_holds_within(name: str) -> None:
    rng = np.random.default_rng(5)
    for n in range(30):
        queue = random_queue(rng, n)
        priority = rng.integers(-2, 3, size=n)
        order = order_within_classes(ORDERINGS[name], PARAMS, priority, *queue)
        assert sorted(order.tolist()) == list(range(n))
        assert priority[order].tolist() == sorted(priority.tolist())
        for one in np.unique(priority):
            members = np.flatnonzero(priority == one)
            hit, todo, waited, prefill, arrival = queue
            columns = hit[members], todo[members], waited[members], prefill[members], arrival[members]
            assert order[priority[order] == one].tolist() == members[ORDERINGS[name](PARAMS, *columns)].tolist()


@each_ordering
def test_only_those_by_arrival_alone_are_indifferent_to_everything_else(name: str) -> None:
    queue = random_queue(np.random.default_rng(10), 60)
    nothing = queue[0] * 0, queue[1] * 0, queue[2] * 0, queue[3] * 0, queue[4]
    same = (ORDERINGS[name](PARAMS, *queue) == ORDERINGS[name](PARAMS, *nothing)).all()
    assert same == (name in ORDERINGS_BY_ARRIVAL_ALONE)


@pytest.mark.parametrize("name", ["fairway", "fairway-absolute-wait"])
def test_work_ahead_of_the_oldest_stays_within_the_published_bound(name: str) -> None:
    rng = np.random.default_rng(2)
    num_tight = 0
    for _ in range(300):
        queue = random_queue(rng, int(rng.integers(1, 60)))
        work = np.maximum(queue[1], 1)
        oldest = int(np.argmin(queue[4]))
        order = ORDERINGS[name](PARAMS, *queue).tolist()
        ahead = order[: order.index(oldest)]
        last = work[ahead[-1]] if ahead else 0
        assert work[ahead].sum() <= work[oldest] / 4 + last
        num_tight += bool(work[ahead].sum() > work[oldest] / 4)
    # The one request of the bound is needed: without it many of these queues would break it.
    assert num_tight > 30


@pytest.mark.parametrize("name", ["lpm", "ragcache", "peek", "absolute-wait", "relative-wait"])
def test_no_bound_on_the_work_ahead_of_the_oldest_holds_without_the_fair_lane(name: str) -> None:
    miss, hits = (0, 2_000, 0.1, 0.2, 0.0), [(6_000, 300, 0.0, 0.63, 0.1)] * 40
    assert ORDERINGS[name](PARAMS, *queue_of(miss, *hits)).tolist()[-1] == 0


def steps_until_the_miss_is_first(name: str, num_steps: int) -> int | None:
    """A miss waits among 120 hits; each step of 0.1 s serves the first in order, and a fresh hit takes its place."""
    hit = (6_000, 300, 0.63)
    arrivals = [0.0] + [0.0] * 120
    for step in range(num_steps):
        now_s = step / 10
        requests = [(0, 6_000, 0.6)] + [hit] * 120
        rows = [(h, c, now_s - at, p, at) for (h, c, p), at in zip(requests, arrivals, strict=True)]
        first = int(ORDERINGS[name](PARAMS, *queue_of(*rows))[0])
        if first == 0:
            return step
        arrivals[first] = now_s
    return None


STARVING = {"lpm", "ragcache", "preble", "peek"}
CARRIED = {"fairway-carried"}
"""What bounds a wait here are the accounts, which one call knows nothing of; see `test_queue_order`."""


@pytest.mark.parametrize("name", sorted(STARVING))
def test_miss_starves_as_long_as_hits_keep_coming(name: str) -> None:
    assert steps_until_the_miss_is_first(name, 1_000) is None


@pytest.mark.parametrize("name", sorted(set(ORDERINGS) - STARVING - CARRIED))
def test_miss_is_served_in_the_end_though_hits_keep_coming(name: str) -> None:
    served_at = steps_until_the_miss_is_first(name, 1_000)
    assert served_at is not None
    assert (served_at == 0) == (name in {"fcfs", "k-lpm-4", "k-lpm-8"})


def test_every_ordering_of_the_settings_exists_and_no_other() -> None:
    assert list(ORDERINGS) == list(get_args(EnginePolicy.model_fields["ordering"].annotation))


def test_arrivals_alone_decide_fcfs() -> None:
    queue = random_queue(np.random.default_rng(6), 60)
    arrivals = queue[4][ORDERINGS["fcfs"](PARAMS, *queue)].tolist()
    assert all(a <= b for a, b in pairwise(arrivals))
