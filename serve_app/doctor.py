"""What on this machine would keep fairway-serve from running, each with its remedy."""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve_app.environment import REQUIRED_ENV
from serve_app.model_files import why_incomplete

DISTRIBUTION = "fairway-serve"
PYTHONS = ((3, 11), (3, 14))
"""From the first, below the second."""
BREAKING_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch than the CPU's, they break `import vllm`; serving text needs none of them."""
MEMORY_NEEDED_GIB = 9.0
"""Two CPU replicas of SmolLM2-135M (3.2 each), Ray's idle workers and what is fixed; measured."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    state: Literal["ok", "note", "wrong"]
    """`note` is something to know that keeps nothing from running."""
    subject: str
    text: str
    """What was found, and for the other two states what to do."""


def findings(model: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Every check, in the order in which to mend things; slow ones (seconds) only where they can tell something."""
    yield check_python(sys.version_info[:2])
    yield from check_pins()
    yield check_torch()
    yield from map(check_breaking_package, BREAKING_PACKAGES)
    yield check_model(model)
    yield check_ray_environment(environ)
    yield check_memory(available_memory_gib())


def check_python(version: tuple[int, int]) -> Finding:
    """Whether this Python is one that the pinned packages are built for."""
    shown = ".".join(map(str, version))
    if PYTHONS[0] <= version < PYTHONS[1]:
        return Finding("ok", "python", shown)
    return Finding("wrong", "python", f"{shown}; make the environment with Python 3.11, 3.12 or 3.13")


def check_pins() -> Iterator[Finding]:
    """Ray and vLLM, as pinned by this package's own metadata; of vLLM either build will do."""
    pins = pinned_versions(importlib.metadata.requires(DISTRIBUTION) or [])
    yield _check_pin("ray", {"ray": pins["ray"]}, "install fairway-serve again")
    vllm = {name: version for name, version in pins.items() if name.startswith("vllm")}
    yield _check_pin("vllm", vllm, "run `scripts/setup` (CPU), or `pip install -e .[gpu]`")


def pinned_versions(requirements: list[str]) -> dict[str, str]:
    """Distribution name -> version of every exact pin in a list of requirements."""
    matches = (re.match(r"([\w.-]+)(?:\[[^]]*\])?==([^;\s]+)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in matches if match}


def check_torch() -> Finding:
    """A CPU build, or another one with a GPU that it can use."""
    version = installed_version("torch")
    if version is None:
        return Finding("wrong", "torch", "not installed; run `scripts/setup`")
    if version.endswith("+cpu"):
        return Finding("ok", "torch", f"{version} (CPU build)")
    import torch  # takes seconds

    if torch.cuda.is_available():
        return Finding("ok", "torch", f"{version}, {torch.cuda.get_device_name()}")
    return Finding(
        "wrong", "torch", f"{version} sees no GPU; mend the driver, or run `scripts/setup` for the CPU build"
    )


def check_breaking_package(name: str) -> Finding:
    """Absent is right; present is right only if it fits this torch."""
    version = installed_version(name)
    if version is None:
        return Finding("ok", name, "not installed, as it should be")
    # In a process of its own: a failed import leaves operators half registered in this one.
    run = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False)
    if run.returncode == 0:
        return Finding("ok", name, f"{version} works with this torch")
    return Finding("wrong", name, f"{version} does not fit this torch and breaks vLLM; `pip uninstall -y {name}`")


def check_model(directory: Path) -> Finding:
    """Whether the model's directory is complete."""
    why = why_incomplete(directory.expanduser())
    if why is None:
        return Finding("ok", "model", str(directory))
    option = " --force" if directory.expanduser().exists() else ""
    remedy = f"make it with `fairway-serve prepare-model {directory}{option}`"
    return Finding("wrong", "model", f"{why}; {remedy}")


def check_ray_environment(environ: Mapping[str, str]) -> Finding:
    """The direct-streaming mode's variables: all unset is fine where no Ray is started by hand, a mixture never is."""
    wrong = {name: environ.get(name) for name, value in REQUIRED_ENV.items() if environ.get(name) != value}
    if not wrong:
        return Finding("ok", "ray mode", "direct streaming is set")
    remedy = "run `source scripts/env.sh` before `ray start`"
    if len(wrong) == len(REQUIRED_ENV) and not any(wrong.values()):
        return Finding("note", "ray mode", f"not set in this shell (scripts/demo sets it by itself); {remedy}")
    shown = ", ".join(f"{name} is {value or 'unset'} and must be {REQUIRED_ENV[name]}" for name, value in wrong.items())
    return Finding("wrong", "ray mode", f"{shown}; {remedy}")


def check_memory(available_gib: float | None) -> Finding:
    """Whether two CPU replicas fit."""
    if available_gib is None:
        return Finding("note", "memory", f"cannot be read here; two CPU replicas take {MEMORY_NEEDED_GIB:.0f} GiB")
    if available_gib >= MEMORY_NEEDED_GIB:
        return Finding("ok", "memory", f"{available_gib:.1f} GiB available")
    remedy = f"two CPU replicas take {MEMORY_NEEDED_GIB:.0f}: free some, or set replicas.count to 1"
    return Finding("wrong", "memory", f"{available_gib:.1f} GiB available; {remedy}")


def available_memory_gib(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """What the kernel says is available, or less where a container's limit is lower; None where there is neither."""
    limits = [_kernel_available_gib(meminfo), _cgroup_available_gib(cgroup)]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def installed_version(distribution: str) -> str | None:
    """A distribution's version, None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_pin(subject: str, accepted: Mapping[str, str], remedy: str) -> Finding:
    found = {name: version for name in accepted if (version := installed_version(name)) is not None}
    for name, version in found.items():
        if version == accepted[name]:
            return Finding("ok", subject, f"{name} {version}")
    shown = ", ".join(f"{name} {version}" for name, version in found.items()) or "not installed"
    wanted = " or ".join(f"{name} {version}" for name, version in accepted.items())
    return Finding("wrong", subject, f"{shown}; {wanted} is needed: {remedy}")


def _kernel_available_gib(meminfo: Path) -> float | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) / 2**20 if match else None


def _cgroup_available_gib(cgroup: Path) -> float | None:
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
        return (int(limit) - int(used)) / 2**30
    except (OSError, ValueError):  # no cgroup v2, or the limit is the word "max"
        return None
