"""What the hooks read and write of vLLM's objects, found in their source; not a test.

Names of variables tell what they hold, so `ROOTS` must follow the hooks. What is behind an index isn't seen.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from serve_app.policies import vllm_hooks

ROOTS = {
    "self.kv_cache_manager": "manager",
    "self._manager": "manager",
    "manager": "manager",
    "self._pool": "pool",
    "pool": "pool",
    "block": "block",
    "parent": "block",
    "request": "request",
    "alone": "request",
    "output": "output",
    "new": "new_request",
    "group": "group",
    "core": "core",
    "vllm_config": "vllm_config",
    "RequestStatus": "RequestStatus",
    "PauseState": "PauseState",
    "SchedulingPolicy": "SchedulingPolicy",
}
"""What the hooks call vLLM's objects."""

BASES = {
    "FairwayScheduler": "scheduler",
    "PolicyBlockPool": "pool",
    "OrderedWaitingQueue": "queue",
    "WatchedBlockMap": "map",
}
"""Our classes that derive from vLLM's: what is not theirs is their base's."""

OURS = {"pool": {"free_block_queue.free"}, "core": {"scheduler.change_policy", "scheduler.policy_stats"}}
"""Paths that lead to our own objects, put in the place of vLLM's."""


def touched_of_vllm() -> Iterator[tuple[str, str, str]]:
    """(file, object, path of attributes) of what the hooks read or write of vLLM's objects."""
    for file in sorted(Path(vllm_hooks.__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_text())
        for path in _paths(tree):
            root = max((root for root in ROOTS if path.startswith(f"{root}.")), key=len, default=None)
            if root is not None:
                yield file.name, ROOTS[root], path.removeprefix(f"{root}.")
        for part in tree.body:
            if isinstance(part, ast.ClassDef) and part.name in BASES:
                for path in _paths(part):
                    name, _, rest = path.partition(".")
                    is_elsewhere = any(path.startswith(f"{root}.") for root in ROOTS)
                    if name == "self" and rest.split(".")[0] not in _own_names(part) and not is_elsewhere:
                        yield file.name, BASES[part.name], rest


def _paths(tree: ast.AST) -> set[str]:
    """The longest paths of attributes from a variable, such as `self.waiting.reorder`."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_path(node)]
    inner = {id(node.value) for node in nodes}
    return {ast.unparse(node) for node in nodes if id(node) not in inner}


def _is_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_path(node.value))


def _own_names(part: ast.ClassDef) -> set[str]:
    """Names that the class defines, or sets on `self`."""
    defined = {node.name for node in part.body if isinstance(node, ast.FunctionDef)}
    annotated = {ast.unparse(node.target) for node in part.body if isinstance(node, ast.AnnAssign)}
    targets = [node for node in ast.walk(part) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return defined | annotated | {node.attr for node in targets if ast.unparse(node.value) == "self"}


def called_on_bases() -> set[str]:
    """Names of the methods that the hooks call on `super()`."""
    called = set()
    for file in Path(vllm_hooks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()":
                called.add(node.attr)
    return called
