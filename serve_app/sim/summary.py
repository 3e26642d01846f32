"""Rows of many traces as one row a family of traces and set of policies.

A trace of a family is a scenario named `family-seedN`. Of every number the median over the family's traces is taken; a
ratio to LPM or FCFS is taken within each trace first. Starved requests are added up. Targets are counted by trace.

Cost: O(rows + targets).
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from serve_app.sim.metrics import Row
from serve_app.sim.report import Target

TRACE = re.compile(r"(?P<family>.+)-seed\d+")
HARDEST_PHASE = "spike"
"""The phase that a summary shows where there is one; elsewhere it shows all phases."""
MEDIANS = ("requests", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "ttft_max_s", "tpot_p50_s", "hit_rate")
SUMMARY_SHOWN = (
    "scenario",
    "phase",
    "ordering",
    "eviction",
    "router",
    "traces",
    "traces_met",
    "targets_met",
    "targets",
    "ttft_p50_s",
    "p50_over_lpm",
    "ttft_p99_s",
    "p99_over_fcfs",
    "ttft_max_s",
    "tpot_p50_s",
    "hit_rate",
    "starved",
)
"""What `tables.text_table` is to show of a summary."""

Policies = tuple[str, ...]


def has_families(rows: Sequence[Row]) -> bool:
    """Whether some scenario is a trace of a family."""
    return any(TRACE.fullmatch(str(row.get("scenario", ""))) for row in rows)


def family_rows(rows: Sequence[Row], targets: Sequence[Target] = ()) -> list[Row]:
    """One row a family, phase and set of policies, in order of first appearance; `scenario` is the family.

    A target counts for the ordering that is the second part of its name, as in `filing-seed0/fairway/spike/p99`.
    `traces_met` is the number of traces that meet all of their targets, `targets_met` the mean number a trace meets.
    """
    with_spike = {row.get("scenario") for row in rows if row.get("phase") == HARDEST_PHASE}
    shown = [row for row in rows if row.get("scenario") not in with_spike or row.get("phase") == HARDEST_PHASE]
    by_place = {_place(row): row for row in shown}
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in shown:
        groups[(_family(row), str(row.get("phase", "")), *_policies(row))].append(row)
    counts = _met_by_trace(targets)
    return [_family_row(family, group, by_place, counts) for (family, *_), group in groups.items()]


def _family_row(
    family: str,
    group: Sequence[Row],
    by_place: Mapping[tuple[str, ...], Row],
    counts: Mapping[tuple[str, str], Sequence[bool]],
) -> Row:
    names = {name: value for name, value in group[0].items() if name in ("phase", "ordering", "eviction", "router")}
    starved = [row["starved"] for row in group if row.get("starved") is not None]
    return {
        "scenario": family,
        **names,
        **({"default": True} if group[0].get("default") else {}),
        "traces": len(group),
        **_targets([counts[key] for row in group if (key := (row["scenario"], row.get("ordering", ""))) in counts]),
        **{name: median(values) for name in MEDIANS if (values := [row[name] for row in group if name in row])},
        **_ratio("p50_over_lpm", "ttft_p50_s", group, by_place, "lpm"),
        **_ratio("p99_over_fcfs", "ttft_p99_s", group, by_place, "fcfs"),
        **({"starved": sum(starved)} if starved else {}),
    }


def _targets(met: Sequence[Sequence[bool]]) -> Row:
    if not met:
        return {}
    return {
        "traces_met": sum(all(one) for one in met),
        "targets_met": fmean(sum(one) for one in met),
        "targets": max(len(one) for one in met),
    }


def _ratio(
    name: str, field: str, group: Sequence[Row], by_place: Mapping[tuple[str, ...], Row], ordering: str
) -> dict[str, float]:
    """Median over the traces of this field over what `ordering` has there with all else alike."""
    pairs = [(row, _counterpart(row, by_place, ordering)) for row in group]
    ratios = [row[field] / other[field] for row, other in pairs if other is not None and other[field] > 0]
    return {name: median(ratios)} if ratios else {}


def _counterpart(row: Row, by_place: Mapping[tuple[str, ...], Row], ordering: str) -> Row | None:
    """This ordering with the same eviction, or with that eviction as it is without its options."""
    evictions = (str(row.get("eviction", "")), str(row.get("eviction", "")).partition(" (")[0])
    found = (by_place.get(_place({**row, "ordering": ordering, "eviction": eviction})) for eviction in evictions)
    return next((one for one in found if one is not None), None)


def _met_by_trace(targets: Sequence[Target]) -> dict[tuple[str, str], list[bool]]:
    """(scenario, ordering) -> whether each of its targets is met."""
    met: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for target in targets:
        scenario, _, rest = target.name.partition("/")
        met[scenario, rest.partition("/")[0]].append(target.met)
    return dict(met)


def _family(row: Row) -> str:
    scenario = str(row.get("scenario", ""))
    match = TRACE.fullmatch(scenario)
    return match["family"] if match else scenario


def _policies(row: Row) -> Policies:
    return tuple(str(row.get(name, "")) for name in ("ordering", "eviction", "router"))


def _place(row: Row) -> tuple[str, ...]:
    return (str(row.get("scenario", "")), str(row.get("phase", "")), *_policies(row))
