"""References to measured numbers in a commentary, so that no number in it can differ from the committed results.

`{{ttft_p99_s ordering=fairway phase=spike}}` is the median of the field over all rows that match; `scripts/results
--help` lists every form. A reference that matches nothing is an error: it would stand for no measurement.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import median

from serve_app.sim.metrics import Row
from serve_app.sim.report import Results, Target
from serve_app.sim.tables import FIELDS, ratio, seconds

REFERENCE = re.compile(r"\{\{(.+?)\}\}")
OVER = " / "
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {"median": median, "max": max, "min": min, "sum": sum}


def resolved(text: str, results: Results) -> str:
    """The text with every reference replaced by its number.

    Raises:
        ValueError: a reference is written wrong or matches nothing; names it.
    """
    return REFERENCE.sub(lambda match: _number(match[1].strip(), results), text)


def _number(reference: str, results: Results) -> str:
    kind, _, rest = reference.partition(" ")
    if kind == "met":
        targets = _targets(rest.strip(), results.targets)
        return f"{sum(target.met for target in targets)} of {len(targets)}"
    if kind == "traces":
        return _traces(_targets(rest.strip(), results.targets))
    if OVER in reference:
        first, _, second = reference.partition(OVER)
        field, value = _measured(first, results.rows)
        divisor = _measured(_inherited(first, second), results.rows)[1]
        if divisor == 0:
            raise ValueError(f"{{{{{reference}}}}} divides by 0")
        return ratio(value / divisor)
    field, value = _measured(reference, results.rows)
    return FIELDS[field][1](value) if field in FIELDS else seconds(value)


def _inherited(first: str, second: str) -> str:
    """What is divided by: all as in the first reference, but for what the second says."""
    words, changes = first.split(), second.split()
    if "=" not in changes[0]:
        return second
    plain = [word for word in words if "=" not in word]
    filters = dict(word.split("=", 1) for word in [*words[len(plain) :], *changes])
    return " ".join([*plain, *(f"{key}={value}" for key, value in filters.items())])


def _measured(reference: str, rows: Sequence[Row]) -> tuple[str, float]:
    """(field, value) of `[reduction] field key=pattern ...`."""
    words = reference.split()
    reduction = REDUCTIONS[words.pop(0)] if words[0] in REDUCTIONS else median
    if not words or any("=" not in word for word in words[1:]):
        raise ValueError(f"{{{{{reference}}}}} is no reference; it must be `[max] field key=value ...`")
    field, patterns = words[0], [word.split("=", 1) for word in words[1:]]
    found = [row for row in rows if all(fnmatchcase(str(row.get(key, "")), pattern) for key, pattern in patterns)]
    values = [row[field] for row in found if row.get(field) is not None]
    if not values:
        raise ValueError(f"{{{{{reference}}}}} matches no row with a {field}")
    return field, reduction(values)


def _targets(pattern: str, targets: Sequence[Target]) -> list[Target]:
    found = [target for target in targets if fnmatchcase(target.name, pattern)]
    if not found:
        raise ValueError(f"no target is named like {pattern!r}")
    return found


def _traces(targets: Sequence[Target]) -> str:
    met: dict[str, bool] = {}
    for target in targets:
        scenario = target.name.partition("/")[0]
        met[scenario] = met.get(scenario, True) and target.met
    return f"{sum(met.values())} of {len(met)}"
