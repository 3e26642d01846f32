"""What was to be shown of routing, from the rows of its experiments."""

from serve_app.sim.chosen import BASELINE, Policies
from serve_app.sim.experiments.base import Rows
from serve_app.sim.report import Target
from serve_app.sim.summary import family_rows

PUBLISHED_BASELINE = ("fcfs", "lru", "cache-aware-0.5")
"""Ordering, eviction and router that the published figures are compared with."""
DEFAULT = (Policies().ordering, Policies().eviction, Policies().router)
BY_THE_PAPERS = 10.0
"""How many times shorter than the published baseline's the median is to be."""


def default_over_all(rows: Rows) -> list[Target]:
    """Of each family's medians: our P50 at most a tenth of the published baseline's, P50 and P99 at most the best's."""
    targets = []
    families = family_rows(rows)
    for scenario in dict.fromkeys(row["scenario"] for row in families):
        here = _by_policies(families, scenario)
        if DEFAULT not in here:
            continue
        ours, others = here[DEFAULT], [row for names, row in here.items() if names[2] != DEFAULT[2]]
        if PUBLISHED_BASELINE in here:
            bound = here[PUBLISHED_BASELINE]["ttft_p50_s"] / BY_THE_PAPERS
            targets.append(Target.at_most(f"{scenario}/default/p50 over published/10", ours["ttft_p50_s"], bound))
        for field in ("ttft_p50_s", "ttft_p99_s"):
            best = min(row[field] for row in others)
            targets.append(Target.at_most(f"{scenario}/default/{field[5:8]} over the best other", ours[field], best))
    return targets


def all_over_pairs(rows: Rows) -> list[Target]:
    """All three of our decisions together have a P50 at most that of each pair and of each alone."""
    targets = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        here = _by_policies(rows, scenario)
        ours = here.get(DEFAULT)
        if ours is None:
            continue
        for names, row in here.items():
            if names != DEFAULT and names[2] in (BASELINE.router, DEFAULT[2]):
                name = f"{scenario}/default/p50 over {' + '.join(names)}"
                targets.append(Target.at_most(name, ours["ttft_p50_s"], row["ttft_p50_s"]))
    return targets


def parity(rows: Rows) -> list[Target]:
    """LBGR within 5 % of least work where there is nothing to learn, and no worse than it under faults."""
    targets = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        here = _by_policies(rows, scenario)
        least = here[*DEFAULT[:2], "least-work"]
        slack = 1.05 if scenario.startswith(("no-shared-prefix", "two-replicas")) else 1.0
        for field in ("ttft_p50_s", "ttft_p95_s"):
            targets.append(Target.at_most(f"{scenario}/lbgr/{field[5:8]}", here[DEFAULT][field], slack * least[field]))
    return targets


def _by_policies(rows: Rows, scenario: str) -> dict[tuple[str, str, str], dict[str, float]]:
    return {
        (row["ordering"], row["eviction"], row["router"]): row
        for row in rows
        if row["scenario"] == scenario and row["phase"] == "all"
    }
