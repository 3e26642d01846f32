"""Every file under cluster/ passes the checks of `ray up`, starts Ray in our mode, and holds what configs/ asks for."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start

from serve_app.environment import DEFAULT_ENV

ROOT = Path(__file__).parents[1]
CLUSTERS = sorted((ROOT / "cluster").glob("*.yaml"))
ON_PREM = ROOT / "cluster" / "on-prem.yaml"
each_cluster = pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)


def loaded(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(path.read_text())
    return parsed


def start_commands(path: Path) -> list[str]:
    """The shell lines that end in `ray start`."""
    config = loaded(path)
    lines = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    return [line for line in lines if "ray start" in line]


def exported(command: str) -> dict[str, str]:
    """What the line exports before it starts Ray."""
    parts = [shlex.split(part) for part in command.split(";")]
    pairs = [word for part in parts[:-1] if part[0] == "export" for word in part[1:]]
    return dict(pair.split("=", 1) for pair in pairs)


def start_options(command: str) -> dict[str, Any]:
    """The line's `ray start` as Ray's own command line reads it."""
    words = shlex.split(command.split(";")[-1])
    assert words[0].endswith("ray")
    assert words[1] == "start"
    options: dict[str, Any] = ray_start.make_context("start", words[2:]).params
    return options


@each_cluster
def test_ray_up_accepts_the_file(path: Path) -> None:
    validate_config(prepare_config(loaded(path)))


@each_cluster
def test_every_start_of_ray_sets_our_environment(path: Path) -> None:
    commands = start_commands(path)
    assert commands
    for command in commands:
        assert exported(command) == {**DEFAULT_ENV, "RAY_AUTH_MODE": "token"}


@each_cluster
def test_the_head_scales_the_cluster_and_shows_its_dashboard_to_itself_only(path: Path) -> None:
    options = start_options(loaded(path)["head_start_ray_commands"][-1])
    assert options["head"]
    assert options["dashboard_host"] == "127.0.0.1"
    assert options["autoscaling_config"] == "~/ray_bootstrap_config.yaml"


def test_on_prem_keeps_work_off_the_head_and_gives_each_worker_one_gpu() -> None:
    head, worker = (start_options(command) for command in start_commands(ON_PREM))
    assert (head["num_cpus"], head["num_gpus"]) == (0, 0)
    assert not worker["head"]
    assert worker["address"] == "$RAY_HEAD_IP:6379"
    assert worker["num_gpus"] == 1


def test_on_prem_has_one_to_ten_workers_as_the_gpu_configuration_has_replicas() -> None:
    prepared = prepare_config(loaded(ON_PREM))
    (node_type,) = prepared["available_node_types"].values()
    (serving,) = [one for one in loaded(ROOT / "configs" / "gpu.yaml")["applications"] if one["name"] == "fairway"]
    replicas, engine = serving["args"]["replicas"], serving["args"]["engine"]["vllm"]
    assert (node_type["min_workers"], node_type["max_workers"]) == (replicas["min"], replicas["max"]) == (1, 10)
    assert engine["tensor_parallel_size"] == 1
    assert len(set(prepared["provider"]["worker_ips"])) == 10


def test_on_prem_installs_the_wheel_of_this_version_into_the_environment_that_starts_ray() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl[gpu]"
    config = loaded(ON_PREM)
    assert wheel in config["setup_commands"][-1]
    environment = config["setup_commands"][-1].split()[0].rpartition("/")[0]
    everything = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert all(f"{environment}/ray " in command for command in everything)


def test_local_has_no_workers() -> None:
    prepared = prepare_config(loaded(ROOT / "cluster" / "local.yaml"))
    (node_type,) = prepared["available_node_types"].values()
    assert (node_type["min_workers"], node_type["max_workers"]) == (0, 0)
    assert start_options(start_commands(ROOT / "cluster" / "local.yaml")[-1])["num_gpus"] == 0
