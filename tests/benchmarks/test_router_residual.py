"""Models of the TTFT on recorded requests: nothing is learned before it was heard, and the tables add up."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import typer
from router_residual import NAMES, NEEDS_DATA, POLICIES, main, recorded, report, row_of, scenarios, windows_of
from router_residual_models import CHOSEN, EXPLICIT, MODELS, Estimators, Sample, former_features, predictions_s

from serve_app.sim.experiments.base import Options
from tests.sim.small_cases import GSP, small_scenario

SETTINGS = POLICIES.router_settings(0)
SCENARIO = small_scenario("small", 0, num_replicas=2, params=replace(GSP, prompts_per_group=20, rate_per_s=9.0))


@cache
def real_samples() -> tuple[Sample, ...]:
    """120 requests on two simulated replicas."""
    return tuple(recorded(SCENARIO.build(), SCENARIO.seed))


def sample(placed_s: float, ttft_s: float, replica_id: str = "a", explicit_s: float = 1.0) -> Sample:
    features = {
        "miss_s": 0.5,
        "hit_s": 0.0,
        "queue_s": placed_s,
        "ahead_s": 0.1,
        "num_queued": 2.0,
        "num_decoding": 3.0,
    }
    return Sample(placed_s, placed_s + ttft_s, replica_id, features, 40, 60, explicit_s, explicit_s, ttft_s)


class Spy:
    """Notes what it is asked in which order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []

    def correction_s(self, sample: Sample) -> float:
        self.log.append(("predict", sample.placed_s))
        return -sample.placed_s

    def learn(self, sample: Sample) -> None:
        self.log.append(("learn", sample.placed_s))


def test_chosen_model_predicts_what_the_router_itself_predicted() -> None:
    samples = real_samples()
    predicted_s = predictions_s(MODELS[CHOSEN](SETTINGS), samples)
    assert len(samples) == 120
    assert predicted_s.tolist() == [one.predicted_s for one in samples]
    corrected = [one for one in samples if one.predicted_s != one.explicit_s]
    assert len(corrected) > 80


def test_each_request_is_learned_from_when_it_was_heard_and_not_before() -> None:
    spy = Spy()
    heard = [sample(0.0, 0.5), sample(1.0, 1.0), sample(0.25, 3.0), sample(2.0, 9.0)]
    predicted_s = predictions_s(spy, heard)
    assert spy.log == [
        ("predict", 0.0),
        ("predict", 0.25),
        ("learn", 0.0),
        ("predict", 1.0),
        ("learn", 1.0),
        ("predict", 2.0),
    ]
    assert predicted_s.tolist() == [1.0, 0.0, 0.75, 0.0], "in the order of the samples, at least 0"


@pytest.mark.parametrize("name", MODELS)
def test_no_prediction_depends_on_what_was_heard_later(name: str) -> None:
    samples = real_samples()
    middle_s = samples[60].heard_s
    changed = [one if one.heard_s <= middle_s else replace(one, ttft_s=50.0 + one.ttft_s) for one in samples]
    before = np.array([one.placed_s <= middle_s for one in samples])
    as_was, otherwise = (predictions_s(MODELS[name](SETTINGS), given) for given in (samples, changed))
    assert as_was[before].tolist() == otherwise[before].tolist()
    assert (as_was[~before].tolist() == otherwise[~before].tolist()) == (name == EXPLICIT)


@pytest.mark.parametrize("name", MODELS)
def test_explicit_terms_stand_alone_until_enough_was_heard(name: str) -> None:
    samples = real_samples()
    enough_s = samples[SETTINGS.residual_min_samples - 1].heard_s
    predicted_s = predictions_s(MODELS[name](SETTINGS), samples)
    early = [
        (found, one.explicit_s) for found, one in zip(predicted_s, samples, strict=True) if one.placed_s < enough_s
    ]
    assert len(early) >= SETTINGS.residual_min_samples
    assert all(found == explicit_s for found, explicit_s in early)


def test_former_model_corrects_by_at_most_the_bound_and_unbounded_by_more() -> None:
    samples = [sample(10.0 * number, 9.0) for number in range(60)]
    bounded, free = (predictions_s(MODELS[name](SETTINGS), samples) - 1.0 for name in ("former", "former, unbounded"))
    assert bounded.max() == SETTINGS.residual_bound_s
    assert free.max() > 2 * SETTINGS.residual_bound_s


def test_former_features_are_the_four_of_before() -> None:
    assert former_features(sample(7.0, 1.0)) == {
        "miss_tokens": 60.0,
        "hit_tokens": 40.0,
        "load_s": 7.0,
        "num_open": 5.0,
    }


def test_one_model_a_replica_knows_nothing_of_the_others() -> None:
    shared, own = Estimators(SETTINGS), Estimators(SETTINGS, per_replica=True)
    for number in range(40):
        for model in (shared, own):
            model.learn(sample(float(number), 3.0, "a"))
    new = sample(41.0, 3.0, "b")
    assert own.correction_s(new) == 0.0
    assert shared.correction_s(new) > 0.5


def test_a_feature_that_is_left_out_changes_nothing() -> None:
    model = Estimators(SETTINGS, ("ahead_s",))
    for one in real_samples():
        model.learn(one)
    asked = real_samples()[-1]
    other = replace(asked, features={**asked.features, "ahead_s": 99.0})
    assert model.correction_s(asked) == model.correction_s(other) != 0.0


def test_row_and_windows_are_means_over_their_requests() -> None:
    samples = [sample(1.0, 2.0, "a"), sample(2.0, 4.0, "b"), sample(3.0, 6.0, "a"), sample(25.0, 1.0, "a")]
    predicted = {CHOSEN: np.array([3.0, 4.0, 4.0, 1.5]), EXPLICIT: np.ones(4)}

    row = row_of("x", samples, predicted)
    first, last = windows_of(samples, predicted, "a")

    assert (row.scenario, row.requests, row.mean_ttft_s) == ("x", 4, 3.25)
    assert row.mae_s == {CHOSEN: (1 + 0 + 2 + 0.5) / 4, EXPLICIT: (1 + 3 + 5 + 0) / 4}
    assert (first.from_s, first.placed, first.share, first.mean_ttft_s) == (0.0, 3, 2 / 3, 4.0)
    assert (first.mae_s, first.bias_s, first.explicit_mae_s, first.explicit_bias_s) == (1.5, 0.5, 3.0, 3.0)
    assert (last.from_s, last.placed, last.share, last.bias_s) == (20.0, 1, 1.0, -0.5)


def test_report_prints_a_row_of_every_model_and_the_slow_replica_over_time(capsys: pytest.CaptureFixture[str]) -> None:
    rows, windows = report({"slow": SCENARIO})
    printed = capsys.readouterr().out.splitlines()
    assert rows[0].mae_s.keys() == MODELS.keys()
    assert all(math.isfinite(error_s) and error_s > 0 for error_s in rows[0].mae_s.values())
    assert printed[2].count("|") == printed[0].count("|") == 4 + len(MODELS)
    assert [float(line.split("|")[1]) for line in printed[6:]] == [one.from_s for one in windows]
    assert sum(one.placed for one in windows) <= rows[0].requests


def test_scenarios_are_those_named_and_recorded_ones_need_data() -> None:
    without, with_data = (scenarios(Options(data=data), small=True) for data in (None, Path("data")))
    assert tuple(with_data) == NAMES
    assert set(NAMES) - set(without) == {NEEDS_DATA}


@pytest.mark.parametrize(("names", "message"), [("gsp-99", "'gsp-99' is none of"), (NEEDS_DATA, "needs --data")])
def test_a_scenario_that_cannot_be_run_is_refused_before_anything_runs(names: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        main(names=f"gsp-8,{names}", data=None, small=True, seed=0, json_path=None)


def test_heard_order_is_the_order_of_the_samples() -> None:
    heard_s: Sequence[float] = [one.heard_s for one in real_samples()]
    assert heard_s == sorted(heard_s)
    assert all(one.heard_s == pytest.approx(one.placed_s + one.ttft_s) for one in real_samples())
