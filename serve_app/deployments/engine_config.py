"""Our settings as Ray Serve LLM's `LLMConfig`: one place where the two vocabularies meet."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.serve.llm import LLMConfig

from serve_app.config import FairwayServeConfig, PrefillTable, ReplicaSettings

EMULATED_WORKER = "serve_app.emulation.worker.EmulatedGpuWorker"
EMULATED_LABEL = "serve_app.emulation.label.EmulatedLabel"
EMULATED_LOG_PREFIX = "EMULATED "
"""Before every line of vLLM's log."""
PROJECT = Path(__file__).resolve().parents[2]
SCHEDULER = "serve_app.policies.vllm_hooks.FairwayScheduler"
ROUTER = "serve_app.router.request_router.LbgrRouter"
AUTOSCALING = "serve_app.deployments.autoscaling:ReplicasForQueuedWork"


class ConfigError(ValueError):
    """A setting that can't be used; the message names field, value, bound and fix."""


def llm_config(config: FairwayServeConfig) -> LLMConfig:
    """What Ray Serve LLM deploys for `config`.

    Raises:
        ConfigError: a file that the settings name is missing or wrong, or an engine argument is ours.
    """
    settings: dict[str, Any] = {
        "model_loading_config": {"model_id": config.model.id, "model_source": _source(config.model.source)},
        "engine_kwargs": _engine_kwargs(config),
        "deployment_config": _deployment(config.replicas),
        "runtime_env": {"env_vars": {**_engine_env(config), "PYTHONHASHSEED": "0"}},
        "server_cls": "serve_app.deployments.worker:FairwayServer",
        "log_engine_metrics": True,
    }
    if config.engine.accelerator == "cpu":
        settings["accelerator_config"] = {"kind": "cpu"}
    elif config.engine.accelerator_type is not None:
        settings["accelerator_type"] = config.engine.accelerator_type
    return LLMConfig(**settings)


def with_profile(config: FairwayServeConfig) -> FairwayServeConfig:
    """`config` with its prefill profile read in, so that no other node needs the file.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    if config.engine.prefill_profile is None:
        return config
    table = read_profile(config.engine.prefill_profile)
    policy = config.engine.policy.model_copy(update={"prefill_profile": table})
    engine = config.engine.model_copy(update={"policy": policy, "prefill_profile": None})
    return config.model_copy(update={"engine": engine})


def read_profile(path: Path) -> PrefillTable:
    """Read and check a prefill profile; a relative path counts from the working directory, else from the project.

    Raises:
        ConfigError: the file is missing, no JSON, or not a `PrefillTable`.
    """
    try:
        return PrefillTable.model_validate(json.loads(_found(path.expanduser()).read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"engine.prefill_profile={str(path)!r} can't be used: {' '.join(str(error).split())}; "
            "name a file made by `fairway-serve profile`, or null"
        ) from error


def is_emulated(engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether an engine with these arguments runs on the emulated GPU, whoever wrote them."""
    return engine_kwargs.get("worker_cls") == EMULATED_WORKER


def _engine_env(config: FairwayServeConfig) -> dict[str, str]:
    env = dict(config.engine.env)
    if config.engine.emulation is not None:
        env["VLLM_LOGGING_PREFIX"] = EMULATED_LOG_PREFIX + env.get("VLLM_LOGGING_PREFIX", "")
    return env


def _found(path: Path) -> Path:
    # Serve builds an application in a worker process, whose working directory is not the operator's.
    return path if path.exists() else PROJECT / path


def _engine_kwargs(config: FairwayServeConfig) -> dict[str, Any]:
    given = dict(config.engine.vllm)
    clash = {"scheduler_cls", "additional_config", "kv_events_config"} & given.keys()
    if clash:
        raise ConfigError(
            f"engine.vllm sets {sorted(clash)}, which fairway-serve sets itself; use engine.policy instead"
        )
    additional = {"fairway": config.engine.policy.model_dump(mode="json")}
    if config.engine.emulation is not None:
        label = [*given.get("middleware", ()), EMULATED_LABEL]
        given |= {"worker_cls": EMULATED_WORKER, "load_format": "dummy", "middleware": label}
        additional["emulation"] = config.engine.emulation.model_dump(mode="json")
    return {"enable_prefix_caching": True, **given, "scheduler_cls": SCHEDULER, "additional_config": additional}


def _source(source: str) -> str:
    """A directory as an absolute path; anything else (a repository, a bucket) as given."""
    path = Path(source).expanduser()
    looks_local = source.startswith(("~", "/", "."))
    if looks_local and not (path / "config.json").is_file():
        raise ConfigError(
            f"model.source={source!r} has no config.json; run `fairway-serve prepare-model {source}` "
            "or name a Hugging Face model directory"
        )
    return str(path.resolve()) if looks_local else source


def _deployment(replicas: ReplicaSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_ongoing_requests": replicas.max_ongoing_requests,
        "ray_actor_options": {"num_cpus": replicas.num_cpus},
        "request_router_config": {"request_router_class": ROUTER, "request_routing_stats_period_s": 2.0},
    }
    if replicas.num_gpus:
        options["ray_actor_options"]["num_gpus"] = replicas.num_gpus
    if replicas.count is not None:
        return {**options, "num_replicas": replicas.count}
    policy = {"policy_function": AUTOSCALING, "policy_kwargs": {"target_queued_s": replicas.target_queued_s}}
    bounds = {"min_replicas": replicas.min, "max_replicas": replicas.max, "initial_replicas": replicas.min}
    return {**options, "autoscaling_config": {**bounds, "policy": policy}}
