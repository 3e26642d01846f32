"""Our settings as Ray Serve LLM's, and what stops a deployment before it starts."""

import importlib
import json
from pathlib import Path

import pytest

from serve_app.config import FairwayServeConfig
from serve_app.deployments.engine_config import (
    EMULATED_LABEL,
    EMULATED_WORKER,
    ROUTER,
    SCHEDULER,
    ConfigError,
    is_emulated,
    llm_config,
    read_profile,
    with_profile,
)
from serve_app.emulation.faults import CrashFault, SlowFault
from serve_app.emulation.settings import EmulationSettings

TABLE = {
    "device": "d",
    "model": "m",
    "dtype": "bf16",
    "vllm_version": "0.29.0",
    "date": "2026-11-30",
    "tokens": [1, 10],
    "seconds": [0.1, 0.2],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def _config(model: Path, **engine: object) -> FairwayServeConfig:
    return FairwayServeConfig.model_validate({"model": {"source": str(model)}, "engine": engine})


def test_scheduler_router_and_policy_reach_the_engine(model: Path) -> None:
    config = llm_config(_config(model, policy={"fast_weight": 8.0}))
    assert config.engine_kwargs["scheduler_cls"] == SCHEDULER
    assert config.engine_kwargs["additional_config"]["fairway"]["fast_weight"] == 8.0
    assert config.deployment_config["request_router_config"]["request_router_class"] == ROUTER
    assert config.runtime_env["env_vars"]["PYTHONHASHSEED"] == "0"


def test_profile_travels_inside_the_settings(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(TABLE))
    config = llm_config(with_profile(_config(model, prefill_profile=str(path))))
    assert config.engine_kwargs["additional_config"]["fairway"]["prefill_profile"]["tokens"] == [1, 10]


@pytest.mark.parametrize("content", [None, "{", "{}", json.dumps({**TABLE, "seconds": [2, 1]})])
def test_unusable_profile_names_field_path_and_fix(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"engine\.prefill_profile='.*profile\.json'.*fairway-serve profile"):
        read_profile(path)


def test_relative_profile_is_found_in_the_project_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_profile(Path("configs/profiles/cpu-smollm2-135m.json")).model == "smollm2-135m-instruct"


def test_model_directory_that_is_not_there_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.source=.*nowhere.*fairway-serve prepare-model"):
        llm_config(_config(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["scheduler_cls", "additional_config", "kv_events_config"])
def test_engine_argument_that_we_set_is_refused(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.vllm sets \['{name}'\].*engine\.policy"):
        llm_config(_config(model, vllm={name: "x"}))


def test_emulated_engine_gets_worker_faults_label_and_log_prefix(model: Path) -> None:
    faults = [{"kind": "slow", "at_step": 5, "for_steps": 2, "factor": 3.0}, {"kind": "crash", "at_step": 9}]
    config = llm_config(
        _config(
            model,
            emulation={"faults": faults},
            vllm={"middleware": ["mine.Own"]},
            env={"VLLM_LOGGING_PREFIX": "one "},
        )
    )
    assert config.engine_kwargs["worker_cls"] == EMULATED_WORKER
    assert config.engine_kwargs["middleware"] == ["mine.Own", EMULATED_LABEL]
    assert config.runtime_env["env_vars"]["VLLM_LOGGING_PREFIX"] == "EMULATED one "
    assert is_emulated(config.engine_kwargs)
    assert config.get_engine_config().frontend_kwargs["middleware"] == ["mine.Own", EMULATED_LABEL]
    sent = json.loads(json.dumps(config.engine_kwargs["additional_config"]))
    assert EmulationSettings.from_section(sent, "emulation").faults == (
        SlowFault(kind="slow", at_step=5, for_steps=2, factor=3.0),
        CrashFault(kind="crash", at_step=9),
    )


def test_real_engine_has_neither_label_nor_log_prefix(model: Path) -> None:
    config = llm_config(_config(model))
    assert "middleware" not in config.engine_kwargs
    assert "VLLM_LOGGING_PREFIX" not in config.runtime_env["env_vars"]
    assert not is_emulated(config.engine_kwargs)


@pytest.mark.parametrize("path", [EMULATED_LABEL, EMULATED_WORKER])
def test_emulated_parts_are_found_where_their_path_says(path: str) -> None:
    module, name = path.rsplit(".", 1)
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_fixed_count_and_autoscaling_exclude_each_other(model: Path) -> None:
    fixed = llm_config(_config(model)).deployment_config
    assert fixed["num_replicas"] == 2
    assert "autoscaling_config" not in fixed
    scaled = FairwayServeConfig.model_validate(
        {"model": {"source": str(model)}, "replicas": {"count": None, "min": 1, "max": 4}}
    )
    options = llm_config(scaled).deployment_config
    assert "num_replicas" not in options
    assert options["autoscaling_config"]["max_replicas"] == 4
