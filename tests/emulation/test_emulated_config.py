"""configs/emulated.yaml says what the emulated engine does."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.config import PrefillTable
from serve_app.emulation.settings import EmulationSettings
from serve_app.emulation.step_time import prefill_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine() -> dict[str, Any]:
    config = yaml.safe_load((ROOT / "configs" / "emulated.yaml").read_text())
    settings: dict[str, Any] = config["applications"][0]["args"]["engine"]
    return settings


def test_prefill_profile_is_that_of_the_emulated_engine(engine: dict[str, Any]) -> None:
    settings = EmulationSettings.model_validate(engine["emulation"])
    given = PrefillTable.model_validate(engine["policy"]["prefill_profile"])
    derived = prefill_table(settings, engine["vllm"]["max_num_batched_tokens"], engine["vllm"]["max_model_len"])
    assert given.tokens == derived.tokens
    assert given.seconds == pytest.approx(derived.seconds, abs=1e-5)
    assert given.base_s == pytest.approx(derived.base_s, abs=1e-5)


def test_longest_prompt_fits_into_the_kv_blocks(engine: dict[str, Any]) -> None:
    settings = EmulationSettings.model_validate(engine["emulation"])
    assert (settings.kv_blocks - 1) * engine["vllm"]["block_size"] >= engine["vllm"]["max_model_len"]


def test_file_and_model_name_say_that_they_are_emulated() -> None:
    text = (ROOT / "configs" / "emulated.yaml").read_text()
    assert text.startswith("# EMULATED")
    assert yaml.safe_load(text)["applications"][0]["args"]["model"]["id"].endswith("-emulated")
