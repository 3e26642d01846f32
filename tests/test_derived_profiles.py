"""The committed derived profiles are what the step-time models give, and say what they are."""

from pathlib import Path

import pytest
from derived_profiles import LONGEST_TOKENS, NAMES, STEP_TOKENS, derived_profile, main, profile_path

from serve_app.config import PrefillTable
from serve_app.deployments.engine_config import read_profile
from serve_app.emulation.step_time import prefill_time_s
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.sim.step_time import DATA_SHEETS, DEVICES

each_device = pytest.mark.parametrize("device", NAMES)


def test_every_device_with_a_data_sheet_has_a_profile() -> None:
    assert set(NAMES) == set(DATA_SHEETS)


def test_committed_files_are_what_would_be_written(tmp_path: Path) -> None:
    main(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {profile_path(device).name: profile_path(device).read_text() for device in NAMES}


@each_device
def test_file_is_a_table_that_says_what_it_is_derived_from(device: str) -> None:
    table = read_profile(profile_path(device))
    assert table.device.endswith("(derived)")
    assert table.model == "Llama-3.1-8B"
    for said in ("data sheet", "TFLOP/s", "not measured", "2,048 tokens a step"):
        assert said in table.derived
    assert not table.date
    assert not table.spread_s


@each_device
@pytest.mark.parametrize("tokens", [1, 64, 2_048, 4_096, 65_536, LONGEST_TOKENS])
def test_profile_gives_the_seconds_of_the_step_time_model(device: str, tokens: int) -> None:
    profile = PrefillProfile(PrefillTable.model_validate_json(profile_path(device).read_text()))
    assert profile.prefill_s_one(tokens) == pytest.approx(prefill_time_s(DEVICES[device], tokens, STEP_TOKENS))


def test_faster_gpu_is_faster_at_every_length() -> None:
    a6000, l40, h200 = (derived_profile(device).seconds for device in ("a6000", "l40", "h200"))
    assert all(fast < middle < slow for fast, middle, slow in zip(h200, l40, a6000, strict=True))
