"""Every file under configs/ loads, down to vLLM's engine arguments, and a mistake is named with its bound."""

import inspect
import json
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE
from ray.serve.schema import ServeDeploySchema

from serve_app.config import EnginePolicy, FairwayServeConfig, ModelSettings
from serve_app.deployments.engine_config import ConfigError, llm_config, with_profile

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)


def loaded(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(path.read_text())
    return parsed


def unknown_keys(model: type[BaseModel], given: dict[str, Any], where: str = "") -> Iterator[str]:
    """Keys that Serve's schema does not have; Serve itself ignores them silently."""
    for key, value in given.items():
        if key not in model.model_fields:
            yield f"{where}{key}"
            continue
        inner = _model_in(model.model_fields[key].annotation)
        if inner is None:
            continue
        for number, one in enumerate(value if isinstance(value, list) else [value]):
            place = f"{where}{key}[{number}]." if isinstance(value, list) else f"{where}{key}."
            if isinstance(one, dict):
                yield from unknown_keys(inner, one, place)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _model_in(one)) is not None), None)


def builder_argument(import_path: str) -> type[BaseModel]:
    """The model that Serve validates an application's `args` against."""
    module, _, name = import_path.partition(":")
    (parameter,) = inspect.signature(getattr(import_module(module), name)).parameters.values()
    assert issubclass(parameter.annotation, BaseModel), "Serve skips validation for anything else"
    return parameter.annotation  # type: ignore[no-any-return]  # checked above


def serving_args(path: Path) -> dict[str, Any]:
    """The arguments of `serve_app.app:build` in a file."""
    (app,) = [one for one in loaded(path)["applications"] if one["import_path"] == "serve_app.app:build"]
    args: dict[str, Any] = app["args"]
    return args


@pytest.fixture
def prepared_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home with the demo's model directory, and the project's root as working directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    model = Path(ModelSettings().source).expanduser()
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return model


@each_config
def test_serve_knows_every_key_of_its_own_levels(path: Path) -> None:
    config = loaded(path)
    assert list(unknown_keys(ServeDeploySchema, config)) == []
    ServeDeploySchema.model_validate(config)


@each_config
def test_each_application_has_a_builder_and_arguments_that_it_takes(path: Path) -> None:
    for app in loaded(path)["applications"]:
        builder_argument(app["import_path"]).model_validate(app["args"])


@each_config
def test_control_looks_for_the_serving_application_of_the_same_file(path: Path) -> None:
    apps = {one["import_path"]: one for one in loaded(path)["applications"]}
    control, serving = apps["serve_app.app:build_control"], apps["serve_app.app:build"]
    assert control["args"]["serving_app"] == serving["name"]
    assert control["route_prefix"] == "/fairway"
    assert serving["route_prefix"] == "/"


@each_config
@pytest.mark.usefixtures("prepared_model")
def test_ray_serve_llm_and_vllm_take_what_the_file_asks_for(path: Path) -> None:
    llm = llm_config(with_profile(FairwayServeConfig.model_validate(serving_args(path))))
    engine = llm.get_engine_config()  # refuses argument names that vLLM does not have
    assert EnginePolicy.model_validate(engine.engine_kwargs["additional_config"]["fairway"])
    assert engine.get_initialization_kwargs()["scheduler_cls"].endswith("FairwayScheduler")


@pytest.mark.usefixtures("prepared_model")
def test_gpu_replicas_take_one_gpu_each_and_scale_from_one_to_ten() -> None:
    llm = llm_config(FairwayServeConfig.model_validate(serving_args(ROOT / "configs" / "gpu.yaml")))
    assert llm.get_engine_config().placement_bundles == [{"GPU": 1}]
    assert "num_gpus" not in llm.deployment_config["ray_actor_options"], "the engine's bundle has the GPU already"
    scaling = llm.deployment_config["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 10)
    assert scaling["policy"]["policy_kwargs"] == {"target_queued_s": 2.0}


@pytest.mark.usefixtures("prepared_model")
def test_local_replicas_take_no_gpu() -> None:
    llm = llm_config(FairwayServeConfig.model_validate(serving_args(ROOT / "configs" / "local.yaml")))
    assert all(not bundle.get("GPU") for bundle in llm.get_engine_config().placement_bundles)
    assert llm.deployment_config["num_replicas"] == 2


def changed(path: Path, dotted: str, value: Any) -> dict[str, Any]:
    """The file's serving arguments with one value replaced or added."""
    args = deepcopy(serving_args(path))
    *parents, last = dotted.split(".")
    place = args
    for key in parents:
        place = place.setdefault(key, {})
    place[last] = value
    return args


@pytest.mark.parametrize(
    ("dotted", "value", "bound"),
    [
        ("replicas.cuont", 3, "Extra inputs are not permitted"),
        ("modle", {}, "Extra inputs are not permitted"),
        ("replicas.count", 101, "less than or equal to 100"),
        ("replicas.count", 0, "greater than or equal to 1"),
        ("replicas.target_queued_s", 0, "greater than 0"),
        ("engine.policy.fast_weight", 0.5, "greater than or equal to 1"),
        ("engine.policy.ordering", "lifo", "or 'fairway-absolute-wait'"),
        ("engine.accelerator", "tpu", "'cpu' or 'gpu'"),
        ("router.routing.weights.queue", 0, "greater than 0"),
        ("router.routing.weights.affinity", -1, "greater than or equal to 0"),
        ("router.decisions_kept", 7, "greater than or equal to 50"),
    ],
)
def test_a_wrong_setting_is_refused_with_field_value_and_bound(dotted: str, value: Any, bound: str) -> None:
    with pytest.raises(ValidationError) as refused:
        FairwayServeConfig.model_validate(changed(CONFIGS[0], dotted, value))
    message = str(refused.value)
    assert f"\n{dotted}\n" in message
    assert bound in message
    assert f"input_value={value!r}" in message


@pytest.mark.usefixtures("prepared_model")
def test_an_engine_argument_that_vllm_does_not_have_is_named() -> None:
    args = changed(ROOT / "configs" / "gpu.yaml", "engine.vllm.max_modle_len", 8192)
    with pytest.raises(ValueError, match="Unknown engine argument: max_modle_len"):
        llm_config(FairwayServeConfig.model_validate(args)).get_engine_config()


def test_a_model_directory_that_is_not_there_is_named(prepared_model: Path) -> None:
    (prepared_model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.source='~/.*prepare-model"):
        llm_config(FairwayServeConfig.model_validate(serving_args(ROOT / "configs" / "local.yaml")))


def test_a_key_that_serve_would_ignore_is_found() -> None:
    config = loaded(CONFIGS[0])
    config["proxy_locatoin"] = "HeadOnly"
    config["http_options"]["prot"] = 8000
    config["applications"][1]["rout_prefix"] = "/"
    assert set(unknown_keys(ServeDeploySchema, config)) == {
        "proxy_locatoin",
        "http_options.prot",
        "applications[1].rout_prefix",
    }


def test_prometheus_reads_the_file_that_ray_writes() -> None:
    config = loaded(ROOT / "configs" / "prometheus.yml")
    (job,) = config["scrape_configs"]
    (discovery,) = job["file_sd_configs"]
    assert [Path(one).name for one in discovery["files"]] == [PROMETHEUS_SERVICE_DISCOVERY_FILE]
