"""The validation's trace: what shares what, when it comes, and what it must not accept."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from validation_trace import PHASES, TraceParams, requests, timed

PARAMS = TraceParams(
    num_requests=200,
    num_documents=4,
    document_tokens=(100, 100),
    question_tokens=(5, 9),
    miss_tokens=(20, 50),
)


def test_hits_continue_one_of_the_documents_and_misses_share_nothing() -> None:
    prompts = [tuple(one.prompt.tolist()) for one in requests(PARAMS, np.random.default_rng(0))]
    misses = [prompt for prompt in prompts if len(prompt) <= 50]
    hits = [prompt for prompt in prompts if len(prompt) > 50]

    assert {105 <= len(prompt) <= 109 for prompt in hits} == {True}
    assert len({prompt[:100] for prompt in hits}) == PARAMS.num_documents
    assert len({prompt[:20] for prompt in misses}) == len(misses)
    assert 0.2 < len(misses) / len(prompts) < 0.4


def test_requests_come_in_phases_whose_mean_gaps_are_the_paces() -> None:
    arrivals = timed(requests(replace(PARAMS, num_requests=4_000), np.random.default_rng(0)), 10.0, _rng())
    gaps_s = np.diff([0.0, *(one.at_s for one in arrivals)])

    assert Counter(one.phase for one in arrivals) == {name: round(share * 4_000) for name, share, _ in PHASES}
    for name, _, pace in PHASES:
        of_phase = [gap for gap, one in zip(gaps_s, arrivals, strict=True) if one.phase == name]
        assert np.mean(of_phase) == pytest.approx(1 / (10.0 * pace), rel=0.1)


def test_mean_utilisation_is_about_nine_tenths() -> None:
    assert 1 / sum(share / pace for _, share, pace in PHASES) == pytest.approx(0.9, abs=0.02)


def test_same_seeds_give_the_same_trace_and_faster_engines_get_it_faster() -> None:
    one, other, twice = (timed(requests(PARAMS, _rng()), capacity, _rng()) for capacity in (3.0, 3.0, 6.0))

    for a, b, c in zip(one, other, twice, strict=True):
        assert (a.at_s, a.request_id, a.prompt.tolist()) == (b.at_s, b.request_id, b.prompt.tolist())
        assert c.at_s == pytest.approx(a.at_s / 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_requests": 0}, "num_requests is 0; it must be at least 1"),
        ({"miss_share": 1.5}, "miss_share is 1.5"),
        ({"document_tokens": (5, 4)}, r"document_tokens is \(5, 4\); it must be two rising lengths of at least 1"),
        ({"miss_tokens": (0, 4)}, r"miss_tokens is \(0, 4\)"),
    ],
)
def test_impossible_traces_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PARAMS, **changed)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("capacity_per_s", [0.0, float("inf"), float("nan")])
def test_engine_without_a_capacity_has_no_times(capacity_per_s: float) -> None:
    with pytest.raises(ValueError, match="capacity_per_s is"):
        timed(requests(PARAMS, _rng()), capacity_per_s, _rng())


def _rng() -> np.random.Generator:
    return np.random.default_rng(1)
