"""What became of the requests of one run, as rows.

TTFT is from arrival at the router to the end of the engine step that sampled the first token, latency to the end of the
step that sampled the last one; HTTP, tokenising and the network take no time here. TPOT is one mean a request,

    TPOT = (latency - TTFT) / (output tokens - 1)

and has no value for a request of one output token. The hit rate is in prompt tokens as the engine counted them when it
first admitted the request. The load share counts requests. A request belongs to the phase in which it arrived.

Starved is a request whose TTFT is above 3x the p99 that FCFS has on the same arrivals (`starved`; house rule), or that
its own policy has (`starved_own`; the papers' rule, which a policy escapes by starving more than one in a hundred).

Cost: O(n log n) a run of n requests.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.sim.columns import Columns, FloatArray, IntArray, Served, columns

PERCENTILES = (50, 95, 99)
TPOT_PERCENTILES = (50, 99)
ALL_PHASES = "all"
"""The phase of the row over all phases, and of arrivals that have no phases."""
STARVED_MULTIPLE = 3.0

Row = dict[str, Any]
Run = Sequence[Served] | Columns
"""The finished requests of one run, in either form."""


def phase_rows(run: Run, num_replicas: int) -> list[Row]:
    """One row a phase, in order of the phases' first arrivals; where there are several, a last one over all.

    Raises:
        ValueError: one of several phases has the name of the row over all.
    """
    table = _as_columns(run)
    rows = [_row(phase, table.of_phase(phase), num_replicas) for phase in table.phases]
    if len(rows) < 2:
        return rows
    if ALL_PHASES in table.phases:
        raise ValueError(f"phase is {ALL_PHASES!r}; beside other phases it must have another name")
    return [*rows, _row(ALL_PHASES, table, num_replicas)]


def with_starvation(rows: Sequence[Row], run: Run, fcfs_rows: Sequence[Row] | None) -> list[Row]:
    """Each row of `phase_rows(run, ...)` with its counts of starved requests.

    Args:
        fcfs_rows: FCFS's own rows, unrounded, on the same arrivals and with all else alike; None if it was not run.

    Raises:
        ValueError: FCFS has no row of a phase, so its arrivals were others.
    """
    table = _as_columns(run)
    limits_s: dict[str, float] = {row["phase"]: row["ttft_p99_s"] for row in fcfs_rows or ()}
    if fcfs_rows is not None and (missing := {row["phase"] for row in rows} - limits_s.keys()):
        raise ValueError(f"fcfs_rows lack the phases {sorted(missing)}; they must be of the same arrivals")
    by_phase = {phase: table.of_phase(phase) for phase in table.phases}
    return [{**row, **starvation(by_phase.get(row["phase"], table), limits_s.get(row["phase"]))} for row in rows]


def starvation(run: Run, fcfs_p99_s: float | None) -> dict[str, int | None]:
    """How many requests starved, by both rules; `starved` is None where FCFS was not run on the same arrivals."""
    ttfts_s = _as_columns(run).ttft_s
    own_p99_s = float(np.percentile(ttfts_s, 99)) if len(ttfts_s) else 0.0
    return {
        "starved": None if fcfs_p99_s is None else starved(ttfts_s, STARVED_MULTIPLE * fcfs_p99_s),
        "starved_own": starved(ttfts_s, STARVED_MULTIPLE * own_p99_s),
    }


def starved(ttfts_s: Sequence[float] | FloatArray, limit_s: float) -> int:
    """How many values are above the limit."""
    return int(np.count_nonzero(np.asarray(ttfts_s) > limit_s))


def tpots_s(table: Columns) -> FloatArray:
    """(m,), seconds, of the m requests with more than one output token."""
    several = table.output_tokens > 1
    tpots: FloatArray = (table.latency_s - table.ttft_s)[several] / (table.output_tokens[several] - 1)
    return tpots


def load_max_over_mean(replicas: Sequence[str] | IntArray, num_replicas: int) -> float:
    """Requests on the busiest replica over the mean of all `num_replicas`, those without any included."""
    counts = np.unique(np.asarray(replicas), return_counts=True)[1]
    return float(counts.max() * num_replicas / len(replicas))


def _row(phase: str, table: Columns, num_replicas: int) -> Row:
    tpots = tpots_s(table)
    return {
        "phase": phase,
        "requests": len(table),
        **_percentiles("ttft", table.ttft_s, PERCENTILES),
        "ttft_max_s": float(table.ttft_s.max()),
        **_percentiles("latency", table.latency_s, PERCENTILES),
        **(_percentiles("tpot", tpots, TPOT_PERCENTILES) if len(tpots) else {}),
        "hit_rate": float(table.cached_tokens.sum() / table.prompt_tokens.sum()),
        "load_max_over_mean": load_max_over_mean(table.replica, num_replicas),
    }


def _percentiles(name: str, values: npt.NDArray[np.float64], percentiles: Sequence[int]) -> dict[str, float]:
    """By linear interpolation between the two nearest ranks."""
    return {
        f"{name}_p{p}_s": float(value) for p, value in zip(percentiles, np.percentile(values, percentiles), strict=True)
    }


def _as_columns(run: Run) -> Columns:
    return run if isinstance(run, Columns) else columns(run)
