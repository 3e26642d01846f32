"""The parts of fairway-carried, by hand and against slow references; the orders of whole queues are in the contract."""

from random import Random

import numpy as np
import pytest

from serve_app.policies.carried import MEMORY_HALF_LIFE_S, carried_order, due_first, size_class_s
from serve_app.policies.fairway import FairwayParams
from serve_app.policies.head_of_line import fitting_first
from serve_app.policies.overtaking import (
    LongestWait,
    ahead_tokens,
    allowance_tokens,
    in_order_of_arrival,
    overtaken_tokens,
)
from serve_app.policies.prefill_share import running_prefill_cap
from tests.policies.test_fairway import queue_of


def test_sizes_up_to_four_times_the_usual_are_one_class_and_decades_from_there() -> None:
    found = size_class_s(np.array([0.03, 0.39, 0.41, 1.0, 3.9, 4.1, 41.0]), usual_s=1.0)
    assert found.tolist() == pytest.approx([0.01, 0.1, 1.0, 1.0, 1.0, 10.0, 100.0])


def test_like_misses_keep_their_order_and_a_decade_shorter_one_passes_once_it_has_waited_its_own_patience() -> None:
    params = FairwayParams(patience_multiple=2.0)
    older, younger = (0, 4_000, 3.0, 0.4, 0.0), (0, 2_000, 2.0, 0.2, 1.0)
    for waited_s, expected in ((0.19, [0, 1, 2]), (0.25, [0, 2, 1]), (0.4, [2, 0, 1])):
        short = (0, 400, waited_s, 0.04, 3.0 - waited_s)
        order = carried_order(params, *queue_of(older, younger, short), usual_prefill_s=0.3)
        assert order.tolist() == expected


def test_due_requests_go_first_and_the_oldest_of_them_before_all() -> None:
    order, arrival_s = np.array([3, 1, 0, 2, 4]), np.array([5.0, 1.0, 4.0, 2.0, 0.0])
    is_due = np.array([True, False, True, False, False])
    assert due_first(order, is_due, arrival_s).tolist() == [2, 0, 3, 1, 4]
    assert due_first(order, is_due & False, arrival_s).tolist() == order.tolist()


def test_longest_wait_fades_by_half_and_a_clock_that_is_set_back_forgets_nothing() -> None:
    longest = LongestWait()
    assert longest.note(8_000, 10.0) == 8_000
    assert longest.note(1_000, 10.0 + MEMORY_HALF_LIFE_S) == pytest.approx(4_000)
    assert longest.note(1_000, -500.0) == pytest.approx(4_000)
    assert longest.note(1_000, -500.0 + 2 * MEMORY_HALF_LIFE_S) == pytest.approx(1_000)


def test_allowance_is_what_is_left_to_the_longest_wait_and_a_quarter_and_never_under_a_step() -> None:
    ahead = np.array([1_000, 6_000, 9_900])
    assert allowance_tokens(4.0, ahead, 8_000.0, 512).tolist() == [9_000.0, 4_000.0, 512.0]


def test_what_is_ahead_counts_the_running_rest_and_all_before_in_order() -> None:
    in_order = in_order_of_arrival(np.array([1, 0, 0]), np.array([0.0, 5.0, 5.0]), np.array([7, 9, 8]))
    assert in_order.tolist() == [2, 1, 0]
    assert ahead_tokens(np.array([10, 20, 40]), in_order, running_tokens=100).tolist() == [170, 160, 140]


def test_overtaken_is_the_sum_of_what_ran_of_later_requests_in_a_random_reference() -> None:
    rng = Random(4)
    for _ in range(200):
        keys = [(rng.randint(0, 1), float(rng.randint(0, 3)), number) for number in range(rng.randint(1, 12))]
        ran = [(*rng.choice(keys), rng.randint(1, 50)) for _ in range(rng.randint(0, 5))]
        priority, arrival_s, number = (np.array(column) for column in zip(*keys, strict=True))
        expected = [sum(tokens for *key, tokens in ran if tuple(key) > mine) for mine in keys]
        assert overtaken_tokens(priority, arrival_s, number, ran).tolist() == expected


def slow_fitting_first(order: list[int], fits: list[bool], due: list[bool]) -> list[int]:
    """One after another from the front: who fits goes, who doesn't waits, and nobody passes one who is due."""
    gone: list[int] = []
    waiting: list[int] = []
    for place, index in enumerate(order):
        if fits[index]:
            gone.append(index)
        elif due[index]:
            return [*gone, index, *waiting, *order[place + 1 :]]
        else:
            waiting.append(index)
    return gone + waiting


def test_those_that_fit_pass_those_that_dont_but_nobody_passes_one_that_is_due() -> None:
    rng = Random(5)
    for _ in range(300):
        n = rng.randint(0, 9)
        order = rng.sample(range(n), n)
        fits, due = [rng.random() < 0.6 for _ in range(n)], [rng.random() < 0.2 for _ in range(n)]
        found = fitting_first(np.array(order, dtype=np.int64), np.array(fits, dtype=bool), np.array(due, dtype=bool))
        assert found.tolist() == slow_fitting_first(order, fits, due)


@pytest.mark.parametrize(
    ("share", "decodes", "prefills", "waiting", "cap"),
    [
        (0.5, 0, 1, [300, 200], 548),  # both fit into the half
        (0.5, 0, 1, [300, 300], 748),  # the second doesn't, so nothing is kept for it
        (0.5, 0, 1, [600, 10], None),  # what begins and doesn't end would be one more long prefill
        (0.5, 48, 1, [300], 700),
        (0.5, 0, 2, [300], 374),
        (0.1, 0, 2, [400], None),  # would itself be held to the cap
        (0.5, 0, 0, [10], None),
        (1.0, 0, 1, [10], None),
        (0.5, 0, 1, [], None),
        (0.5, 1_047, 1, [10], None),
    ],
)
def test_running_prefills_make_room_for_what_can_be_computed_whole(
    share: float, decodes: int, prefills: int, waiting: list[int], cap: int | None
) -> None:
    found = running_prefill_cap(share, 1_048, decodes, prefills, waiting)
    assert found == cap
