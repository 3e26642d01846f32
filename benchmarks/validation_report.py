"""Pairs of a measured and a simulated run of one trace: kept as files, compared as rows and targets.

Per engine and policies, over the runs, each number is the median of the runs' own; the compared one is

    |median simulated p50 / median measured p50 - 1| <= tolerance

Cost: O(n log n) for n requests.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serve_app.emulation.settings import EmulationSettings
from serve_app.sim.columns import Served
from serve_app.sim.metrics import Row, phase_rows
from serve_app.sim.report import Target
from serve_app.sim.whole_file import whole_file

MEASURED, SIMULATED = "measured", "simulated"
FIELDS = ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "ttft_max_s", "latency_p50_s", "tpot_p50_s", "hit_rate")
"""Of `phase_rows`, which the two runs are compared by."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One trace on the engine and on the simulator."""

    engine: str
    policies: str
    number: int
    """Of the run; it seeds the randomized eviction."""
    trace: int
    """Seed of the trace."""
    device: EmulationSettings
    """What the simulator took the engine for: measured in the same session."""
    late_s: float
    """By how much the latest request was sent too late, seconds."""
    measured: list[Served]
    simulated: list[Served]


def write_pair(path: Path, pair: Pair) -> None:
    """Whole or not at all."""
    with whole_file(path) as file:
        file.write(json.dumps({**asdict(pair), "device": pair.device.model_dump(mode="json")}).encode())


def read_pair(path: Path) -> Pair:
    """What `write_pair` wrote.

    Raises:
        OSError: there is no such file.
        ValueError: it is no such file.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        runs = {name: [Served(**one) for one in document[name]] for name in (MEASURED, SIMULATED)}
        return Pair(**{**document, "device": EmulationSettings.model_validate(document["device"]), **runs})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no pair of runs: {error}") from error


def rows_of(pairs: Iterable[Pair], policies: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Two rows an engine and policies, measured and simulated, each the median of the runs.

    Args:
        policies: the fields of a row that name the policies, by their name in `Pair.policies`.
    """
    rows: list[Row] = []
    for (engine, name), group in _grouped(pairs).items():
        for side in (MEASURED, SIMULATED):
            runs = [phase_rows(getattr(pair, side), 1)[-1] for pair in group]
            medians = {field: statistics.median(run[field] for run in runs) for field in FIELDS}
            counts = {"phase": "all", "requests": sum(run["requests"] for run in runs), "runs": len(runs)}
            rows.append({"scenario": f"{engine}-{side}", **policies[name], **counts, **medians})
    return rows


def targets_of(pairs: Iterable[Pair], tolerances: Mapping[str, float]) -> list[Target]:
    """The medians of each engine and policies within the engine's tolerance, and the policies in the same order."""
    p50s = {place: (_p50_s(group, MEASURED), _p50_s(group, SIMULATED)) for place, group in _grouped(pairs).items()}
    targets = [
        Target.at_most(f"{engine}/{name}/median differs", abs(simulated_s / measured_s - 1), tolerances[engine])
        for (engine, name), (measured_s, simulated_s) in p50s.items()
    ]
    for engine in dict.fromkeys(engine for engine, _ in p50s):
        medians = [both for (other, _), both in p50s.items() if other == engine]
        targets.append(Target.at_most(f"{engine}/pairs of policies in another order", _swapped(medians), 0))
    return targets


def _swapped(medians: Sequence[tuple[float, float]]) -> int:
    """How many pairs the two numbers order differently."""
    return sum(
        (one[0] - other[0]) * (one[1] - other[1]) < 0
        for index, one in enumerate(medians)
        for other in medians[index + 1 :]
    )


def _p50_s(pairs: Sequence[Pair], side: str) -> float:
    return float(statistics.median(phase_rows(getattr(pair, side), 1)[-1]["ttft_p50_s"] for pair in pairs))


def _grouped(pairs: Iterable[Pair]) -> dict[tuple[str, str], list[Pair]]:
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.engine, pair.policies), []).append(pair)
    return groups


def table(pairs: Sequence[Pair]) -> str:
    """Markdown: per engine and policies the medians of both, their ratio, and the ratios of the single runs."""
    lines = [
        "| engine | policies | runs | measured p50 s | simulated p50 s | ratio | ratios of the runs "
        "| measured p99 s | simulated p99 s | ratio | measured hits | simulated hits | sent late at most ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (engine, name), group in _grouped(pairs).items():
        runs = [(phase_rows(one.measured, 1)[-1], phase_rows(one.simulated, 1)[-1]) for one in group]
        (p50, p50_sim), (p99, p99_sim), (hits, hits_sim) = (
            [statistics.median(run[side][field] for run in runs) for side in (0, 1)]
            for field in ("ttft_p50_s", "ttft_p99_s", "hit_rate")
        )
        ratios = sorted(simulated["ttft_p50_s"] / measured["ttft_p50_s"] for measured, simulated in runs)
        late_ms = 1e3 * max(pair.late_s for pair in group)
        lines.append(
            f"| {engine} | {name} | {len(group)} | {p50:.3f} | {p50_sim:.3f} | {p50_sim / p50:.3f} "
            f"| {' '.join(f'{one:.2f}' for one in ratios)} | {p99:.3f} | {p99_sim:.3f} | {p99_sim / p99:.3f} "
            f"| {hits:.3f} | {hits_sim:.3f} | {late_ms:.0f} |"
        )
    return "\n".join(lines)
