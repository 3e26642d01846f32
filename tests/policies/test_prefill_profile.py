import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import PrefillTable
from serve_app.policies import PrefillProfile
from serve_app.policies.prefill_profile import slope_beyond

TEN_MILLION = 10_000_000


def table_of(tokens: tuple[int, ...], seconds: tuple[float, ...], base_s: float = 0.0) -> PrefillTable:
    return PrefillTable(
        device="test",
        model="test",
        dtype="float32",
        vllm_version="0.29.0",
        date="2026-01-01",
        tokens=tokens,
        seconds=seconds,
        base_s=base_s,
        hit_s_per_token=1e-5,
    )


CPU = table_of((256, 1_024, 2_048, 4_000), (0.36, 1.9, 4.8, 12.7), base_s=0.05)
PROFILE = PrefillProfile(CPU)


@st.composite
def tables(draw: st.DrawFn) -> PrefillTable:
    tokens = sorted(draw(st.sets(st.integers(1, 100_000), min_size=2, max_size=8)))
    seconds = sorted(draw(st.lists(st.floats(0, 100), min_size=len(tokens), max_size=len(tokens))))
    return table_of(tuple(tokens), tuple(seconds), base_s=draw(st.floats(0, 10)))


def test_cold_prompt_costs_what_the_table_says_at_its_knots() -> None:
    assert PROFILE.prefill_s(np.array(CPU.tokens)) == pytest.approx(CPU.seconds)
    assert [PROFILE.prefill_s_one(tokens) for tokens in CPU.tokens] == pytest.approx(CPU.seconds)


def test_cached_prompt_costs_the_base() -> None:
    assert PROFILE.prefill_s_one(0, context_tokens=3_000) == pytest.approx(0.05)


def test_same_tokens_cost_more_on_a_longer_context() -> None:
    assert PROFILE.prefill_s_one(100, context_tokens=3_000) > 2 * PROFILE.prefill_s_one(100)


def test_beyond_the_table_the_last_slope_holds() -> None:
    slope = (12.7 - 4.8) / (4_000 - 2_048)
    assert PROFILE.prefill_s_one(10_000) == pytest.approx(12.7 + 6_000 * slope)


def test_flat_last_segment_gives_way_to_the_mean_slope_of_the_table() -> None:
    profile = PrefillProfile(table_of((100, 200, 300), (1.0, 3.0, 3.0)))
    assert profile.prefill_s_one(1_300) == pytest.approx(3.0 + 1_000 * (3.0 - 1.0) / 200)


def test_steep_last_segment_counts_for_at_most_twice_the_mean_slope() -> None:
    profile = PrefillProfile(table_of((100, 4_096, 4_097), (0.1, 4.0, 4.5)))
    assert profile.prefill_s_one(5_097) == pytest.approx(4.5 + 1_000 * 2 * (4.5 - 0.1) / 3_997)


@given(
    st.sets(st.integers(1, 100_000), min_size=2, max_size=8),
    *[st.floats(0, unit) for unit in (1.0, 1e-3, 1e-6)],
)
def test_last_slope_of_a_prefill_without_noise_is_never_changed(
    lengths: set[int], constant_s: float, s_per_token: float, s_per_pair: float
) -> None:
    tokens = sorted(lengths)
    seconds = [constant_s + s_per_token * count + s_per_pair * count**2 for count in tokens]
    last_slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
    assert slope_beyond(table_of(tuple(tokens), tuple(seconds))) == pytest.approx(last_slope, rel=1e-6, abs=1e-10)


@given(tables().filter(lambda table: len(table.tokens) > 2), st.floats(0, 1))
def test_entry_before_the_last_moves_the_slope_beyond_by_a_factor_of_two_at_most(
    table: PrefillTable, share: float
) -> None:
    *others, before_s, _, last_s = table.seconds
    noisy = table_of(table.tokens, (*others, before_s, before_s + share * (last_s - before_s), last_s))
    lower, upper = sorted((slope_beyond(table), slope_beyond(noisy)))
    assert 0 <= lower <= upper <= 2 * lower * (1 + 1e-9)


@given(tables(), st.lists(st.integers(0, TEN_MILLION), min_size=2, max_size=6), st.integers(0, TEN_MILLION))
def test_beyond_the_table_time_never_falls_and_is_finite(table: PrefillTable, counts: list[int], context: int) -> None:
    profile = PrefillProfile(table)
    todo = np.array(sorted([*counts, TEN_MILLION]), dtype=np.int64)
    seconds = profile.prefill_s(todo, context)
    assert np.isfinite(seconds).all()
    assert seconds.min() >= table.base_s
    assert (np.diff(seconds) >= -1e-9 * seconds[-1]).all()
    assert seconds.tolist() == pytest.approx([profile.prefill_s_one(int(count), context) for count in todo])


def test_cached_tokens_cost_their_share() -> None:
    assert PROFILE.hit_s(2_000) == pytest.approx(0.02)


@given(tables(), st.integers(0, 300_000), st.integers(0, 300_000), st.integers(0, 300_000))
def test_time_is_finite_never_falls_and_never_undercuts_the_base(table: PrefillTable, a: int, b: int, c: int) -> None:
    profile = PrefillProfile(table)
    less, more = profile.prefill_s(np.array(sorted((a, b))), c)
    assert np.isfinite(more)
    assert table.base_s - 1e-9 <= less <= more + 1e-9


@given(tables(), st.integers(0, 300_000), st.integers(0, 300_000))
def test_scalar_and_array_agree(table: PrefillTable, todo: int, context: int) -> None:
    profile = PrefillProfile(table)
    many = profile.prefill_s(np.array([todo, 0]), np.array([context, context]))
    assert many.tolist() == pytest.approx([profile.prefill_s_one(todo, context), profile.prefill_s_one(0, context)])


def test_flat_profile_has_one_speed_everywhere() -> None:
    profile = PrefillProfile.flat()
    assert profile.prefill_s(np.array([0, 1, 10_000, 1_000_000]), 5_000).tolist() == pytest.approx([0, 1e-4, 1, 100])
    assert "10000 tokens/s" in profile.table.derived


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_flat_profile_refuses_a_speed_that_is_not_above_zero(speed: float) -> None:
    with pytest.raises(ValueError, match=rf"tokens_per_s is {speed}; it must be above 0"):
        PrefillProfile.flat(speed)
