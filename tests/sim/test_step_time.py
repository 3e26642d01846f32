"""Step-time models: derived ones against a calculation by hand, fitted ones against what they were fitted to."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import PrefillTable
from serve_app.emulation.settings import EmulationSettings
from serve_app.emulation.step_time import prefill_time_s
from serve_app.sim.chosen import BASELINE
from serve_app.sim.run import Cluster, Simulation
from serve_app.sim.scenarios.sizing import engine
from serve_app.sim.step_time import CPU_SMOLLM2, DATA_SHEETS, DEVICES, LLAMA_3_1_8B, derived, fitted
from tests.sim.test_sim_run import arrival

PROFILE = Path(__file__).parents[2] / "configs" / "profiles" / "cpu-smollm2-135m.json"
CPU_STEP_TOKENS, CPU_KV_BLOCKS = 2_048, 1_456
LENGTHS = (100, 700, 1_000, 2_048, 5_000, 9_000)
STEP_TOKENS = 1_024


@pytest.mark.parametrize(
    ("device", "base_s", "s_per_token", "s_per_pair", "s_per_context_token", "kv_blocks"),
    [
        # 16.06 GB of weights / 768 GB/s + 2 ms; 13.96 GFLOP / (0.55 * 154.8 TFLOP/s); 524,288 FLOP / (0.4 * the same);
        # 131,072 bytes / 768 GB/s; (0.9 * 48 - 16.06 - 2) GB / (16 * 131,072 bytes).
        ("a6000", 0.02291146, 1.639652e-4, 8.467183e-9, 1.706667e-7, 11_987),
        ("l40", 0.02058796, 1.401923e-4, 7.239547e-9, 1.517037e-7, 11_987),
        ("h200", 0.005345833, 2.566412e-5, 1.325298e-9, 2.730667e-8, 51_898),
    ],
)
def test_derived_coefficients_are_those_of_a_calculation_by_hand(
    device: str, base_s: float, s_per_token: float, s_per_pair: float, s_per_context_token: float, kv_blocks: int
) -> None:
    settings = derived(DATA_SHEETS[device], LLAMA_3_1_8B)
    assert DEVICES[device] == settings
    assert settings.step_base_s == pytest.approx(base_s, rel=1e-6)
    assert settings.s_per_token == pytest.approx(s_per_token, rel=1e-6)
    assert settings.s_per_token_context == pytest.approx(s_per_pair, rel=1e-6)
    assert settings.s_per_context_token == pytest.approx(s_per_context_token, rel=1e-6)
    assert settings.kv_blocks == kv_blocks
    assert settings.time_scale == 1.0


def test_parameters_of_the_model_are_what_its_published_shape_adds_up_to() -> None:
    hidden, inner, vocabulary, layers, kv_width = 4_096, 14_336, 128_256, 32, 8 * 128
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * inner
    assert pytest.approx(layers * layer, rel=1e-3) == LLAMA_3_1_8B.multiplied_parameters
    assert pytest.approx(layers * layer + 2 * vocabulary * hidden, rel=1e-3) == LLAMA_3_1_8B.parameters
    assert layers * 2 * kv_width * 2 == LLAMA_3_1_8B.kv_bytes_per_token


def test_larger_blocks_are_fewer_and_hold_as_much() -> None:
    small, large = (derived(DATA_SHEETS["l40"], LLAMA_3_1_8B, size).kv_blocks for size in (16, 64))
    assert small // 4 == large


def test_model_that_does_not_fit_is_refused() -> None:
    sheet = replace(DATA_SHEETS["l40"], memory_bytes=20e9)
    with pytest.raises(ValueError, match=r"memory_bytes is 2e\+10; 1\.606e\+10 bytes of weights"):
        derived(sheet, LLAMA_3_1_8B)


def seconds_of(settings: EmulationSettings, lengths: Sequence[int] = LENGTHS) -> list[float]:
    return [prefill_time_s(settings, tokens, STEP_TOKENS) for tokens in lengths]


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-9, 1e-6))
def test_fit_of_a_models_own_table_gives_the_model_back(base_s: float, s_per_token: float, s_per_pair: float) -> None:
    model = EmulationSettings(
        step_base_s=base_s, s_per_token=s_per_token, s_per_token_context=s_per_pair, kv_blocks=500
    )
    found = fitted(LENGTHS, seconds_of(model), STEP_TOKENS, 500)
    # The terms differ by orders of magnitude, so seconds are compared more closely than coefficients.
    assert seconds_of(found) == pytest.approx(seconds_of(model), rel=1e-9)
    for name in ("step_base_s", "s_per_token", "s_per_token_context"):
        assert getattr(found, name) == pytest.approx(getattr(model, name), rel=1e-4)
    assert found.kv_blocks == 500


def relative_gradient(settings: EmulationSettings, measured_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(3,), correlation of the relative errors with each term, in the order base, tokens, pairs."""
    errors = np.asarray(seconds_of(settings)) / measured_s - 1
    ones = [EmulationSettings(step_base_s=1.0, s_per_token=0.0), EmulationSettings(step_base_s=0.0, s_per_token=1.0)]
    ones.append(EmulationSettings(step_base_s=0.0, s_per_token=0.0, s_per_token_context=1.0))
    terms = np.asarray([seconds_of(one) for one in ones]) / measured_s
    gradient: npt.NDArray[np.float64] = terms @ errors / np.linalg.norm(terms, axis=1)
    return gradient


@given(st.lists(st.floats(0.2, 5.0), min_size=len(LENGTHS), max_size=len(LENGTHS)))
def test_fit_of_noisy_seconds_has_no_negative_term_and_those_left_are_the_best(noise: list[float]) -> None:
    measured_s = np.asarray(noise) * seconds_of(EmulationSettings(step_base_s=0.01, s_per_token_context=1e-8))
    found = fitted(LENGTHS, measured_s.tolist(), STEP_TOKENS, 10)
    terms = np.array([found.step_base_s, found.s_per_token, found.s_per_token_context])
    assert np.all(terms >= 0)
    assert np.any(terms > 0)
    # Least squares: no term that is used can be moved either way for a smaller sum.
    assert relative_gradient(found, measured_s)[terms > 0] == pytest.approx(0.0, abs=1e-6)


def test_seconds_that_rise_ever_slower_leave_no_attention_term() -> None:
    found = fitted((100, 200, 400, 800), (0.11, 0.2, 0.35, 0.6), 1_000, 10)
    assert found.s_per_token_context == 0.0
    assert found.s_per_token > 0.0


def test_two_measurements_are_too_few_for_three_terms() -> None:
    with pytest.raises(ValueError, match="2 measurements were given"):
        fitted((64, 128), (0.1, 0.2), 512, 10)


def test_cpu_device_is_fitted_to_the_committed_measurement_and_within_3_3_percent_of_it() -> None:
    table = PrefillTable.model_validate_json(PROFILE.read_text())
    assert fitted(table.tokens, table.seconds, CPU_STEP_TOKENS, CPU_KV_BLOCKS) == CPU_SMOLLM2
    assert DEVICES["cpu-smollm2"] == CPU_SMOLLM2
    predicted_s = [prefill_time_s(CPU_SMOLLM2, tokens, CPU_STEP_TOKENS) for tokens in table.tokens]
    errors = np.abs(np.asarray(predicted_s) / np.asarray(table.seconds) - 1)
    assert errors.max() <= 0.033


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_makes_an_engine_that_serves_a_request_in_its_own_time(device: str) -> None:
    params = engine(device)
    simulation = Simulation(Cluster(params), BASELINE, 0)
    simulation.run([arrival("one", 0.0, list(range(1_000)))])
    assert simulation.served[0].ttft_s == pytest.approx(prefill_time_s(DEVICES[device], 1_000, params.max_step_tokens))
