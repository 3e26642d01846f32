"""The residual learns what the explicit terms miss, stays bounded whatever it sees, and starts anew after a shift."""

import random
from collections.abc import Callable

import pytest

from serve_app.router.estimator import TARGET_LIMIT_S, ResidualEstimator

Features = dict[str, float]
A, B = "replica-a", "replica-b"


def draw(rng: random.Random) -> Features:
    return {
        "miss_tokens": rng.uniform(0, 4_000),
        "hit_tokens": rng.uniform(0, 4_000),
        "load_s": rng.uniform(0, 5),
        "num_open": float(rng.randrange(20)),
    }


def teach(
    estimator: ResidualEstimator, residual_s: Callable[[Features], float], count: int, rng: random.Random
) -> None:
    for _ in range(count):
        features = draw(rng)
        estimator.observe(A, features, 0.5, 0.5 + residual_s(features) + rng.gauss(0, 0.02))


def test_cold_estimator_predicts_nothing_and_says_so() -> None:
    estimator, rng = ResidualEstimator(1.0, min_samples=16), random.Random(0)
    teach(estimator, lambda _: 0.4, 15, rng)
    assert (estimator.predict_s(A, draw(rng)), estimator.state.cold, estimator.state.samples) == (0.0, True, 15)
    teach(estimator, lambda _: 0.4, 1, rng)
    assert not estimator.state.cold
    assert estimator.predict_s(A, draw(rng)) > 0.2


@pytest.mark.parametrize("offset_s", [0.4, -0.3])
def test_constant_offset_is_learned_either_way(offset_s: float) -> None:
    estimator, rng = ResidualEstimator(1.0, 16), random.Random(1)
    teach(estimator, lambda _: offset_s, 300, rng)
    assert estimator.predict_s(A, draw(rng)) == pytest.approx(offset_s, abs=0.05)
    assert estimator.state.mae_s < 0.05 < abs(offset_s) - 0.05 < estimator.state.explicit_mae_s
    assert abs(estimator.state.bias_s) < 0.05
    assert estimator.state.drifts == 0


def test_slope_is_learned() -> None:
    estimator, rng = ResidualEstimator(1.0, 16), random.Random(2)
    teach(estimator, lambda x: 1e-4 * x["miss_tokens"], 500, rng)
    low, high = draw(rng) | {"miss_tokens": 500.0}, draw(rng) | {"miss_tokens": 3_500.0}
    assert estimator.predict_s(A, low) == pytest.approx(0.05, abs=0.06)
    assert estimator.predict_s(A, high) == pytest.approx(0.35, abs=0.06)


def test_prediction_recovers_from_absurd_observations_and_a_choice_stays_bounded_whatever_it_is() -> None:
    estimator, rng = ResidualEstimator(0.5, 16), random.Random(3)
    teach(estimator, lambda _: 0.2, 200, rng)
    for explicit_s, observed_s in ((0.0, 1e9), (1e9, 0.0)):
        estimator.observe(A, dict.fromkeys(draw(rng), 1_000_000_000.0), explicit_s, observed_s)
    for _ in range(50):
        wild = {name: rng.uniform(-1e12, 1e12) for name in draw(rng)}
        assert abs(estimator.choice_s(A)) <= 0.5
        assert abs(estimator.predict_s(A, wild)) <= 2 * TARGET_LIMIT_S
    teach(estimator, lambda _: 0.2, 200, rng)
    assert estimator.predict_s(A, draw(rng)) == pytest.approx(0.2, abs=0.08)


def test_replica_that_differs_gets_a_term_of_its_own_which_goes_with_it() -> None:
    estimator, rng = ResidualEstimator(5.0, 16), random.Random(6)
    for _ in range(400):
        for replica_id, residual_s in ((A, 0.2), (B, 1.0)):
            estimator.observe(replica_id, draw(rng), 0.5, 0.5 + residual_s + rng.gauss(0, 0.02))
    assert estimator.predict_s(A, draw(rng)) == pytest.approx(0.2, abs=0.12)
    assert estimator.predict_s(B, draw(rng)) == pytest.approx(1.0, abs=0.12)
    assert estimator.predict_s("new", draw(rng)) == pytest.approx(0.6, abs=0.12)
    assert estimator.replica_ids() == {A, B}
    estimator.forget(B)
    assert estimator.predict_s(B, draw(rng)) == pytest.approx(0.6, abs=0.12)
    assert estimator.errors(B).predictions == 0 < estimator.errors(A).predictions


def test_choice_heeds_a_replica_s_own_term_within_its_bound_and_no_noise() -> None:
    estimator, rng = ResidualEstimator(0.5, 16), random.Random(8)
    beyond_noise = 0
    for _ in range(1_000):
        for replica_id in (A, B):
            estimator.observe(replica_id, draw(rng), 1.0, 1.0 + rng.gauss(0.3, 0.2))
        beyond_noise += estimator.choice_s(A) != 0.0
    assert beyond_noise < 20
    for _ in range(60):
        for replica_id, slower_s in ((A, 0.0), (B, 3.0)):
            estimator.observe(replica_id, draw(rng), 1.0, 1.3 + slower_s + rng.gauss(0, 0.2))
    assert estimator.choice_s(B) == 0.5
    assert estimator.choice_s(A) <= 0.0 == estimator.choice_s("new")


def test_interval_covers_nine_of_ten_observations_of_steady_noise() -> None:
    estimator, rng = ResidualEstimator(5.0, 16), random.Random(7)
    for _ in range(2_000):
        estimator.observe(A, draw(rng), 1.0, 1.0 + rng.gauss(0.3, 0.1))
    state = estimator.state
    assert state.interval_s == pytest.approx(1.645 * 0.1, rel=0.25)
    assert state.coverage == pytest.approx(0.9, abs=0.12)


def test_error_that_rises_starts_the_model_anew_and_it_recovers() -> None:
    estimator, rng = ResidualEstimator(1.0, 16), random.Random(4)
    teach(estimator, lambda x: 2e-4 * (x["miss_tokens"] - 2_000), 600, rng)
    assert estimator.state.drifts == 0
    teach(estimator, lambda x: 0.8 - 2e-4 * (x["miss_tokens"] - 2_000), 400, rng)
    assert estimator.state.drifts >= 1
    assert not estimator.state.cold
    probe = draw(rng) | {"miss_tokens": 3_000.0}
    assert estimator.predict_s(A, probe) == pytest.approx(0.6, abs=0.1)


def test_error_that_falls_is_no_drift() -> None:
    estimator, rng = ResidualEstimator(1.0, 16), random.Random(5)
    for spread_s in (0.8, 0.01):
        for _ in range(600):
            estimator.observe(A, draw(rng), 1.0, 1.0 + rng.uniform(-spread_s, spread_s))
    assert estimator.state.drifts == 0


def test_prediction_is_scored_before_it_is_learned() -> None:
    estimator = ResidualEstimator(1.0, 1)
    estimator.observe(A, {"miss_tokens": 1.0}, 1.0, 3.0)
    assert (estimator.state.mae_s, estimator.state.bias_s, estimator.state.explicit_mae_s) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_number_that_is_not_finite_is_refused_and_not_learned(bad: float) -> None:
    estimator = ResidualEstimator(1.0, 1)
    with pytest.raises(ValueError, match="load_s must be finite"):
        estimator.predict_s(A, {"load_s": bad})
    for features, explicit_s, observed_s in (({"load_s": bad}, 1.0, 1.0), ({}, bad, 1.0), ({}, 1.0, bad)):
        with pytest.raises(ValueError, match="must be finite"):
            estimator.observe(A, features, explicit_s, observed_s)
    assert estimator.state.samples == 0


def test_impossible_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="bound_s must be finite and above 0, got 0"):
        ResidualEstimator(0.0, 1)
    with pytest.raises(ValueError, match="min_samples must be at least 1, got 0"):
        ResidualEstimator(1.0, 0)
