"""`serve.ingress` pickles a deployment while its class is being made: a name bound below is missing in the replica."""

import ast
from pathlib import Path

import pytest

import serve_app.deployments

MODULES = sorted(Path(serve_app.deployments.__file__).parent.glob("*.py"))


def _ingress_class(tree: ast.Module) -> int | None:
    """Index of the statement that defines a class decorated with `serve.ingress(...)`."""
    for index, statement in enumerate(tree.body):
        decorators = statement.decorator_list if isinstance(statement, ast.ClassDef) else []
        if any(ast.unparse(decorator).startswith("serve.ingress") for decorator in decorators):
            return index
    return None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_nothing_is_defined_below_a_class_that_serve_pickles(path: Path) -> None:
    tree = ast.parse(path.read_text())
    index = _ingress_class(tree)
    below = [] if index is None else [ast.unparse(statement).splitlines()[0] for statement in tree.body[index + 1 :]]
    assert below == []


def test_the_check_sees_both_applications() -> None:
    found = [path.stem for path in MODULES if _ingress_class(ast.parse(path.read_text())) is not None]
    assert found == ["control", "ingress"]
