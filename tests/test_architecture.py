"""Arrows point one way, and private names of others stay in the one file that may hold them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import serve_app

PACKAGE = Path(serve_app.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAY_IMPORT = {
    "policies": {"policies", "config", "settings"},
    "router": {"router", "policies", "config", "settings"},
    "emulation": {"emulation", "policies", "config", "settings"},
    "sim": {"sim", "emulation", "router", "policies", "config", "settings"},
    "observability": {"observability", "config", "settings"},
    "deployments": {
        "deployments",
        "router",
        "policies",
        "observability",
        "dashboard",
        "environment",
        "config",
        "settings",
    },
}
"""Room -> the rooms and top-level modules of ours that it may import."""


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _rooms(path: Path) -> set[str]:
    ours = [name.split(".") for name in _imports(path) if name.startswith("serve_app.")]
    return {parts[1] for parts in ours}


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent != PACKAGE], ids=_name)
def test_room_imports_only_what_lies_below_it(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    assert _rooms(path) <= MAY_IMPORT.get(room, set()), _rooms(path)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_private_names_of_ray_are_imported_in_one_file(path: Path) -> None:
    private = [name for name in _imports(path) if name.startswith("ray") and "._" in name]
    assert private == []
    source = path.read_text()
    assert ("ray.llm._internal" in source) == (_name(path) == "router/ray_internals.py")


@pytest.mark.parametrize("path", list((PACKAGE / "policies").glob("*.py")), ids=_name)
def test_policies_know_vllm_in_one_folder_and_have_no_clock_log_or_input(path: Path) -> None:
    roots = {name.split(".")[0] for name in _imports(path)}
    assert not roots & {"vllm", "torch", "ray", "time", "logging", "os", "pathlib", "asyncio", "zmq"}, roots
