"""What a cell's answers come to, its file, and the table over all files.

Times are emulated seconds: wall seconds over the time scale. Hit rate: cached over prompt tokens, as the engines
counted them. Share: requests of the busiest engine over the mean of all. Requests without a complete answer are counted
as errors and enter no other column. Pure but for the files; cost O(n log n) for n requests.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from router_emulated_cells import ROUTERS, STATES, Scale
from router_emulated_cpu import BUSY_BOUND
from router_emulated_load import Answer

from serve_app.sim.columns import Served
from serve_app.sim.metrics import phase_rows

COLUMNS: Mapping[str, tuple[str, str]] = {
    "latency_p50_s": ("P50 s", ".2f"),
    "latency_p95_s": ("P95 s", ".2f"),
    "latency_p99_s": ("P99 s", ".2f"),
    "ttft_p50_s": ("TTFT P50 s", ".2f"),
    "ttft_p95_s": ("TTFT P95 s", ".2f"),
    "ttft_p99_s": ("TTFT P99 s", ".2f"),
    "hit_rate": ("hit rate", ".3f"),
    "load_max_over_mean": ("max/mean share", ".2f"),
    "errors": ("errors", ".0f"),
    "late_p99_ms": ("sent late P99 ms", ".1f"),
    "cpu_busy": ("CPU busy", ".2f"),
}
"""The table's columns: heading and format."""
SUMMED = ("errors",)
LARGEST = ("late_p99_ms", "cpu_busy")
"""What the table gives the sum or the largest of, over the seeds; of all others the mean."""
ROW_DIGITS = 4

Row = dict[str, Any]


def row_of(answers: Sequence[Answer], scale: Scale) -> Row:
    """One run's figures; only counts and lateness where no request was answered."""
    good = [answer for answer in answers if not answer.error]
    late_s = [answer.late_s for answer in answers]
    row: Row = {"requests": len(answers), "errors": len(answers) - len(good)}
    row["late_p99_ms"] = float(np.percentile(late_s, 99)) * 1e3
    if good:
        served = [_served(number, answer, scale.time_scale) for number, answer in enumerate(good)]
        row |= {name: value for name, value in phase_rows(served, scale.engines)[0].items() if name in COLUMNS}
    return {name: round(value, ROW_DIGITS) for name, value in row.items()}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write a cell's result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    part.replace(path)


def read_result(path: Path) -> dict[str, Any]:
    """A cell's result.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        result["settings"]["cell"], result["row"], result["run"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no cell's result ({error!r}); remove it") from error
    return result


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Markdown, one line for each rate, state and router, over the seeds; all results of one scale."""
    lines = [
        "| rate /s | state | router | seeds | " + " | ".join(heading for heading, _ in COLUMNS.values()) + " |",
        "| ---: | --- | --- | ---: |" + " ---: |" * len(COLUMNS),
    ]
    for key, group in groupby(sorted(results, key=_place), key=_place):
        lines.append(_line(list(group), key))
    return "\n".join(lines)


def _served(number: int, answer: Answer, time_scale: float) -> Served:
    return Served(
        str(number),
        answer.replica,
        "all",
        answer.at_s / time_scale,
        answer.ttft_s / time_scale,
        answer.latency_s / time_scale,
        answer.prompt_tokens,
        answer.cached_tokens,
        answer.output_tokens,
    )


def _place(result: Mapping[str, Any]) -> tuple[float, int, int]:
    cell = result["settings"]["cell"]
    return cell["rate_per_s"], STATES.index(cell["state"]), list(ROUTERS).index(cell["router"])


def _line(results: Sequence[Mapping[str, Any]], place: tuple[float, int, int]) -> str:
    rate_per_s, state, router = place
    rows = [{**result["row"], **result["run"]} for result in results]
    figures = [_figure(name, [row[name] for row in rows if name in row]) for name in COLUMNS]
    seeds = " ".join(str(result["settings"]["cell"]["seed"]) for result in results)
    cells = [f"{rate_per_s:g}", STATES[state], list(ROUTERS)[router], seeds, *figures]
    return f"| {' | '.join(cells)} |"


def _figure(name: str, values: Sequence[float]) -> str:
    if not values:
        return "-"
    value = sum(values) if name in SUMMED else max(values) if name in LARGEST else statistics.fmean(values)
    mark = " (!)" if name == "cpu_busy" and value > BUSY_BOUND else ""
    return f"{value:{COLUMNS[name][1]}}{mark}"
