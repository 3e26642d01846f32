"""The step-time model against a slow reference, and the prefill table that follows from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.emulation.settings import EmulationSettings
from serve_app.emulation.step_time import Chunk, prefill_table, prefill_time_s, step_time_s
from serve_app.policies.prefill_profile import PrefillProfile

SETTINGS = EmulationSettings(
    step_base_s=0.005, s_per_token=1e-4, s_per_token_context=3e-9, s_per_context_token=2e-7, time_scale=2.0
)
CHUNKS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2_000)), max_size=4)


def slow_step_time_s(settings: EmulationSettings, chunks: list[Chunk]) -> float:
    """Token by token, each attending to everything before it and to itself; each chunk reads its context once."""
    if not chunks:
        return 0.0
    seconds = settings.step_base_s
    for num_tokens, num_context in chunks:
        seconds += settings.s_per_context_token * num_context
        for position in range(num_context, num_context + num_tokens):
            seconds += settings.s_per_token + settings.s_per_token_context * (position + 1)
    return seconds * settings.time_scale


@given(CHUNKS)
def test_step_time_equals_the_sum_over_tokens(chunks: list[Chunk]) -> None:
    assert step_time_s(SETTINGS, chunks) == pytest.approx(slow_step_time_s(SETTINGS, chunks), rel=1e-9)


def test_step_of_one_chunk_matches_a_calculation_by_hand() -> None:
    # 2 * (5 ms + 100 * 0.1 ms + (100 * 1,000 + 5,050) pairs * 3 ns + 1,000 * 0.2 us)
    assert step_time_s(SETTINGS, [(100, 1_000)]) == pytest.approx(0.0310303)


@pytest.mark.parametrize("chunk", [(0, 5), (-1, 0), (1, -1)])
def test_impossible_chunk_is_refused(chunk: Chunk) -> None:
    with pytest.raises(ValueError, match="chunk"):
        step_time_s(SETTINGS, [chunk])


def test_chunked_prefill_pays_the_base_once_a_step_and_the_same_work() -> None:
    whole, chunked = prefill_time_s(SETTINGS, 2_048, 2_048), prefill_time_s(SETTINGS, 2_048, 512)
    reads_s = SETTINGS.s_per_context_token * (512 + 1_024 + 1_536)
    assert chunked - whole == pytest.approx((3 * SETTINGS.step_base_s + reads_s) * SETTINGS.time_scale)


@pytest.mark.parametrize("longest", [2, 3, 1_000, 4_096])
def test_prefill_profile_agrees_with_the_model_it_was_made_from(longest: int) -> None:
    table = prefill_table(SETTINGS, max_step_tokens=512, max_prompt_tokens=longest)
    assert table.tokens[0] == 1
    assert table.tokens[-1] == longest
    profile = PrefillProfile(table)
    for tokens in table.tokens:
        assert profile.prefill_s_one(tokens) == pytest.approx(prefill_time_s(SETTINGS, tokens, 512))


@pytest.mark.parametrize("field", ["step_base_s", "time_scale", "kv_blocks", "text_num_ids"])
def test_setting_below_its_bound_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        EmulationSettings.model_validate({field: -1})


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="step_base_ms"):
        EmulationSettings.model_validate({"step_base_ms": 5})
