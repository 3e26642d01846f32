"""The online estimate on engines whose step times are known, stepped as vLLM's engine core steps them."""

import math
import random
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.policies import PrefillProfile
from serve_app.policies.online_prefill import (
    MIN_PREFILL_STEPS,
    MIN_STEPS,
    REFIT_STEPS,
    START_TOKENS_PER_S,
    STEPS_KEPT,
    OnlinePrefill,
)
from serve_app.policies.prefill_profile import ExpectedPrefill

BUDGET_TOKENS = 2_048
BASE_S = 0.012
S_PER_TOKEN = 8e-5

Step = tuple[int, int]
"""Prefill and decode tokens."""


def mixed_steps(rng: random.Random, num_steps: int) -> Iterator[Step]:
    """Requests of all lengths in chunks of a token budget, decodes beside them, and decodes alone in between."""
    waiting_tokens, num_decodes = 0, 8
    for _ in range(num_steps):
        num_decodes = min(max(num_decodes + rng.choice((-1, 0, 1)), 1), 64)
        if rng.random() < 0.3:
            waiting_tokens += round(math.exp(rng.uniform(math.log(30), math.log(6_000))))
        prefill_tokens = min(waiting_tokens, BUDGET_TOKENS - num_decodes)
        waiting_tokens -= prefill_tokens
        yield prefill_tokens, num_decodes


def noisy_s(rng: random.Random, number: int, step: Step, slower: float = 1.0) -> float:
    """The known line with 10 % of noise; the first ten steps compile for seconds, then one in ten is an outlier."""
    seconds = slower * (BASE_S + S_PER_TOKEN * sum(step)) * rng.lognormvariate(0.0, 0.1)
    if number < 10:
        return seconds + rng.uniform(1.0, 20.0)
    return seconds * (rng.uniform(3.0, 30.0) if rng.random() < 0.1 else 1.0)


class KnownEngine:
    """Calls `schedule` as vLLM's engine core does, `in_flight` steps ahead, and lets the estimate see each interval."""

    def __init__(self, estimate: OnlinePrefill, in_flight: int, seed: int = 0) -> None:
        self.estimate = estimate
        self.in_flight = in_flight
        self.rng = random.Random(seed)
        self.now_s = self.device_free_s = 0.0
        self.number = 0
        self._ends_s: deque[float] = deque()
        self._scheduled: tuple[float, Step] | None = None

    def run(self, steps: Iterator[Step], slower: float = 1.0) -> None:
        for step in steps:
            if self._scheduled:
                began_s, scheduled = self._scheduled
                self.estimate.observe(self.now_s - began_s, *scheduled)
            self._scheduled = (self.now_s, step)
            self.device_free_s = max(self.device_free_s, self.now_s) + noisy_s(self.rng, self.number, step, slower)
            self.number += 1
            self._ends_s.append(self.device_free_s)
            self.now_s += 1e-4  # what scheduling takes
            if len(self._ends_s) >= self.in_flight:
                self.now_s = max(self.now_s, self._ends_s.popleft())

    def idle(self, seconds: float) -> None:
        """Everything ends, and nothing is asked for a while."""
        self.now_s = max(self.now_s, self.device_free_s) + seconds
        self._ends_s.clear()
        self._scheduled = None
        self.estimate.pause()


def true_prefill_s(tokens: int, slower: float = 1.0) -> float:
    return slower * (S_PER_TOKEN * tokens + BASE_S * max(tokens / BUDGET_TOKENS, 1.0))


def assert_close_to_the_truth(estimate: OnlinePrefill, slower: float = 1.0) -> None:
    for tokens in (500, 1_000, 2_000, 8_000, 100_000):
        assert estimate.prefill_s_one(tokens) == pytest.approx(true_prefill_s(tokens, slower), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_known_line_is_found_within_a_tenth_in_spite_of_noise_outliers_and_pauses(in_flight: int, seed: int) -> None:
    engine = KnownEngine(OnlinePrefill(), in_flight, seed)
    for _ in range(60):
        engine.run(mixed_steps(engine.rng, 20))
        engine.idle(engine.rng.expovariate(1.0))
    assert_close_to_the_truth(engine.estimate)
    assert engine.estimate.line.s_per_token == pytest.approx(S_PER_TOKEN, rel=0.1)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pauses_that_nobody_tells_of_are_outliers_among_others(in_flight: int) -> None:
    engine = KnownEngine(OnlinePrefill(), in_flight)
    for _ in range(60):
        engine.run(mixed_steps(engine.rng, 20))
        engine.now_s += engine.rng.expovariate(1.0)
    assert_close_to_the_truth(engine.estimate)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_device_that_slows_down_is_followed(in_flight: int) -> None:
    engine = KnownEngine(OnlinePrefill(), in_flight)
    engine.run(mixed_steps(engine.rng, 1_000))
    assert_close_to_the_truth(engine.estimate)
    engine.run(mixed_steps(engine.rng, 1_000), slower=3.0)
    assert_close_to_the_truth(engine.estimate, slower=3.0)


def test_decodes_alone_do_not_push_out_what_prefills_taught() -> None:
    engine = KnownEngine(OnlinePrefill(), in_flight=1)
    engine.run(mixed_steps(engine.rng, 1_000))
    engine.run((0, engine.rng.randint(1, 64)) for _ in range(20_000))
    assert_close_to_the_truth(engine.estimate)


def test_steps_that_are_all_of_one_size_give_their_own_speed() -> None:
    estimate = OnlinePrefill()
    for _ in range(100):
        estimate.observe(0.2, BUDGET_TOKENS - 10, 10)
    assert estimate.prefill_s_one(10 * BUDGET_TOKENS) == pytest.approx(10 * 0.2)
    assert estimate.prefill_s_one(BUDGET_TOKENS // 2) == pytest.approx(0.1)


def test_steps_that_all_take_the_same_time_give_a_price_a_step() -> None:
    """As on a GPU whose steps are bound by reading the weights: a longer prompt needs more of the steps seen."""
    rng, estimate = random.Random(0), OnlinePrefill()
    for _ in range(200):
        estimate.observe(0.02, rng.randint(1, 500), 0)
    largest = estimate.line.largest_tokens
    assert 400 < largest <= 500
    assert estimate.prefill_s_one(100) == pytest.approx(0.02)
    assert estimate.prefill_s_one(10 * largest) == pytest.approx(0.2)


def test_flat_speed_holds_until_enough_steps_prefilled() -> None:
    estimate = OnlinePrefill()
    for _ in range(10 * MIN_STEPS):
        estimate.observe(0.5, 0, 30)
    for _ in range(MIN_PREFILL_STEPS - 1):
        estimate.observe(0.5, 100, 30)
    assert estimate.prefill_s_one(5_000) == 5_000 / START_TOKENS_PER_S
    assert "assumed 10000 tokens/s" in estimate.table.derived
    estimate.observe(0.5, 100, 30)
    assert estimate.prefill_s_one(5_000) > 10 * 5_000 / START_TOKENS_PER_S
    assert f"learned from {10 * MIN_STEPS + MIN_PREFILL_STEPS} engine steps" in estimate.table.derived


def test_before_it_knows_anything_it_answers_as_the_flat_profile_does() -> None:
    both: list[ExpectedPrefill] = [OnlinePrefill(), PrefillProfile.flat(START_TOKENS_PER_S)]
    todo = np.array([0, 1, 5_000, 10_000_000])
    online, flat = (estimate.prefill_s(todo, 1_000).tolist() for estimate in both)
    assert online == pytest.approx(flat)
    assert [estimate.hit_s(100) for estimate in both] == [0.0, 0.0]
    # The table that it gives is one from which a profile answers the same.
    assert PrefillProfile(both[0].table).prefill_s(todo).tolist() == pytest.approx(online)


def test_few_steps_of_a_size_are_not_believed() -> None:
    estimate = OnlinePrefill()
    for _ in range(MIN_STEPS):
        estimate.observe(0.02, 100, 0)
    estimate.observe(900.0, 5_000, 0)
    estimate.observe(900.0, 5_000, 0)
    for _ in range(REFIT_STEPS):
        estimate.observe(0.02, 100, 0)
    assert estimate.prefill_s_one(5_000) == pytest.approx(1.0)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_teach_nothing(step_s: float) -> None:
    estimate = OnlinePrefill()
    for _ in range(3 * MIN_STEPS):
        estimate.observe(step_s, 1_000, 3)
    assert estimate.prefill_s_one(5_000) == 5_000 / START_TOKENS_PER_S


def test_time_that_a_step_without_tokens_took_is_that_of_the_step_before() -> None:
    """Lone prompts, two steps in flight: an empty step is scheduled at once, and its time is the prompt's."""
    estimate = OnlinePrefill()
    for number in range(4 * MIN_STEPS):
        tokens = (100, 400, 1_600)[number % 3]
        estimate.observe(1e-5, tokens, 0)
        estimate.observe(1e-4 * tokens, 0, 0)
        estimate.pause()
    assert estimate.line.s_per_token == pytest.approx(1e-4)


@pytest.mark.parametrize(("prefill", "decode"), [(-1, 5), (5, -1)])
def test_negative_tokens_are_refused(prefill: int, decode: int) -> None:
    with pytest.raises(ValueError, match=f"prefill_tokens={prefill}, decode_tokens={decode}; neither may be negative"):
        OnlinePrefill().observe(0.1, prefill, decode)


OBSERVATIONS = st.lists(
    st.tuples(st.floats(1e-6, 1e3), st.integers(0, 100_000), st.integers(0, 1_000)), min_size=MIN_STEPS, max_size=80
)


@given(OBSERVATIONS, st.lists(st.integers(0, 10_000_000), min_size=2, max_size=8), st.integers(0, 1_000_000))
def test_whatever_was_seen_time_never_falls_is_never_negative_and_is_finite(
    seen: list[tuple[float, int, int]], counts: list[int], context: int
) -> None:
    estimate = OnlinePrefill()
    for step in seen:
        estimate.observe(*step)
    todo = np.array(sorted(counts), dtype=np.int64)
    seconds = estimate.prefill_s(todo, context)
    assert np.isfinite(seconds).all()
    assert seconds.min() >= 0.0
    assert (np.diff(seconds) >= -1e-9 * seconds[-1]).all()
    assert seconds.tolist() == pytest.approx([estimate.prefill_s_one(int(count), context) for count in todo])
    assert estimate.hit_s(5_000) == 0.0
    assert estimate.table.base_s == estimate.line.base_s


@given(OBSERVATIONS)
def test_same_steps_give_the_same_answer(seen: list[tuple[float, int, int]]) -> None:
    answers = []
    for _ in range(2):
        estimate = OnlinePrefill()
        for step in seen:
            estimate.observe(*step)
        answers.append(estimate.line)
    assert answers[0] == answers[1]


def test_state_stays_bounded_however_long_it_runs() -> None:
    estimate = OnlinePrefill()
    engine = KnownEngine(estimate, in_flight=2)
    engine.run(mixed_steps(engine.rng, 20_000))
    most = 2 * BUDGET_TOKENS.bit_length() * STEPS_KEPT
    assert 100 < len(estimate._same_step) <= most
    assert 100 < len(estimate._step_before) <= most
