import numpy as np
import pytest

from serve_app.policies import FairwayParams, waiting_order
from serve_app.policies.fairway import FloatArray, IntArray
from tests.policies.slow_references import slow_waiting_order

Queue = tuple[IntArray, IntArray, FloatArray, FloatArray, FloatArray]


def queue_of(*requests: tuple[int, int, float, float, float]) -> Queue:
    hit, todo, waited, prefill, arrival = (list(column) for column in zip(*requests, strict=True))
    return np.array(hit), np.array(todo), np.array(waited), np.array(prefill), np.array(arrival)


def random_queue(rng: np.random.Generator, n: int) -> Queue:
    """A RAG-like queue: work differs 100-fold, arrivals and scores tie now and then."""
    hit = rng.choice([0, 0, 64, 2_048, 6_000], size=n)
    todo = rng.choice([0, 1, 60, 300, 300, 2_500, 6_000], size=n)
    arrival = np.round(rng.uniform(0, 30, size=n), rng.integers(0, 3))
    waited = 30.0 - arrival
    return hit, todo, waited, (hit + todo) / 10_000, arrival


def test_hand_checked_example_serves_five_hits_then_the_oldest() -> None:
    miss = (0, 6_000, 0.2, 0.6, 0.0)
    hits = [(6_000, 300, 0.1 - i / 100, 0.63, 0.1 + i / 100) for i in range(7)]
    order = waiting_order(FairwayParams(), *queue_of(miss, *hits))
    assert order.tolist() == [1, 2, 3, 4, 5, 0, 6, 7]


def test_order_equals_the_slow_reference_on_random_queues() -> None:
    rng = np.random.default_rng(1)
    for _ in range(400):
        weight, multiple, floor_s = rng.choice([1.0, 2.5, 4.0, 7.0], size=3)
        params = FairwayParams(float(weight), float(multiple), float(floor_s) / 4)
        queue = random_queue(rng, int(rng.integers(0, 30)))
        expected = slow_waiting_order(params, *(column.tolist() for column in queue))
        assert waiting_order(params, *queue).tolist() == expected


def test_older_request_overtakes_when_waited_past_its_patience() -> None:
    hit = (900, 100, 0.0, 0.1, 10.0)
    patient = (0, 1_000, 8.0, 0.1, 2.0)
    impatient = (0, 1_000, 10.0, 0.1, 0.0)
    order = waiting_order(FairwayParams(), *queue_of(hit, patient))
    assert order.tolist() == [0, 1]
    order = waiting_order(FairwayParams(), *queue_of(hit, impatient))
    assert order.tolist() == [1, 0]


def test_patience_grows_with_the_expected_prefill_time() -> None:
    short = (0, 1_000, 5.0, 0.1, 1.0)
    long = (0, 1_000, 6.0, 100.0, 0.0)
    order = waiting_order(FairwayParams(fast_weight=1.0), *queue_of(short, long))
    assert order.tolist() == [0, 1]


def test_equal_requests_go_by_arrival_then_by_index() -> None:
    same = (10, 10, 1.0, 0.1)
    order = waiting_order(FairwayParams(), *queue_of((*same, 5.0), (*same, 4.0), (*same, 5.0), (*same, 4.0)))
    assert order.tolist() == [1, 3, 0, 2]


def test_request_with_nothing_to_compute_counts_as_one_token() -> None:
    done, one = (500, 0, 0.0, 0.1, 0.0), (500, 1, 0.0, 0.1, 0.0)
    cold = (0, 4, 0.0, 0.1, -1.0)
    assert waiting_order(FairwayParams(), *queue_of(cold, done)).tolist() == [1, 0]
    assert waiting_order(FairwayParams(), *queue_of(cold, one)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("fast_weight", 0.5, "at least 1"),
        ("fast_weight", float("nan"), "at least 1"),
        ("fast_weight", float("inf"), "finite"),
        ("patience_multiple", 0.0, "above 0"),
        ("patience_floor_s", -1.0, "above 0"),
    ],
)
def test_parameter_out_of_bounds_is_refused_by_name_value_and_bound(field: str, value: float, bound: str) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value}.*{bound}"):
        FairwayParams(**{field: value})
