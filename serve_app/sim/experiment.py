"""One experiment from its cases to its results: run, turn into rows, judge."""

import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from serve_app.sim.chosen import Policies
from serve_app.sim.columns import Columns
from serve_app.sim.experiments import EXPERIMENTS, Experiment, Options
from serve_app.sim.experiments.base import ALL_DECISIONS
from serve_app.sim.grid import Case, Outcome, run_cases
from serve_app.sim.metrics import Row, phase_rows, with_starvation
from serve_app.sim.report import Results, versions

NAMES = ("scenario", "ordering", "eviction", "router")
FCFS = "fcfs"
DEFAULT = Policies().labels()
Runs = Mapping[str, Mapping[str, Columns]]
"""Scenario -> policies in words -> requests."""


def cases_of(experiment: str, options: Options, scenarios: str = "*") -> list[Case]:
    """The cases of an experiment in the scenarios whose name matches the pattern (`fnmatch`).

    Raises:
        ValueError: there is no such experiment, or it has no such scenario.
    """
    if experiment not in EXPERIMENTS:
        raise ValueError(f"EXPERIMENT is {experiment!r}; it must be one of {', '.join(EXPERIMENTS)}")
    cases = EXPERIMENTS[experiment].cases(options)
    names = list(dict.fromkeys(case.scenario.name for case in cases))
    chosen = [case for case in cases if fnmatchcase(case.scenario.name, scenarios)]
    if not chosen:
        why = f"it must match one of {', '.join(names)}" if names else "its scenarios need the recorded data"
        raise ValueError(f"--scenario is {scenarios!r}; {why}")
    return chosen


def run_experiment(
    name: str,
    options: Options,
    jobs: int = 1,
    resume: Path | None = None,
    scenarios: str = "*",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Results, Runs]:
    """Run an experiment and judge it; see `grid.run_cases` for jobs, resume and progress.

    Targets are judged of the scenarios that were run.

    Raises:
        ValueError: a name, an option or a setting is wrong.
    """
    started_s = time.monotonic()
    cases = cases_of(name, options, scenarios)
    outcomes = run_cases(cases, jobs, resume, progress)
    experiment = EXPERIMENTS[name]
    rows = rows_of(outcomes, experiment.decisions)
    results = Results(
        experiment=name,
        seed=options.seed,
        parameters=_parameters(experiment, options, scenarios, outcomes),
        versions=versions(),
        rows=rows,
        targets=experiment.targets(rows),
        approximations=tuple(experiment.approximations),
        elapsed_s=time.monotonic() - started_s,
    )
    return results, _runs(outcomes)


def rows_of(outcomes: Sequence[Outcome], decisions: Sequence[str] = ALL_DECISIONS) -> list[Row]:
    """One row a case and phase, with what starved by FCFS's measure on the same arrivals and with all else alike.

    `default` marks the product's own choice in these decisions.
    """
    plain = {_place(outcome.case): _phases(outcome) for outcome in outcomes}
    rows = []
    for outcome in outcomes:
        place = _place(outcome.case)
        judged = with_starvation(plain[place], outcome.columns, _fcfs_rows(outcome.case, plain))
        labels = outcome.case.policies.labels()
        is_default = all(labels[name] == DEFAULT[name] for name in decisions)
        names = {"scenario": place[0], **labels, **({"default": True} if is_default else {})}
        rows += [{**names, **row} for row in judged]
    return rows


def _fcfs_rows(case: Case, plain: Mapping[tuple[str, ...], list[Row]]) -> list[Row] | None:
    """FCFS with this eviction and router, or with the eviction and router of these names as they are by default."""
    scenario, _, *others = _place(case)
    named = (case.policies.eviction, case.policies.router)
    return plain.get((scenario, FCFS, *others)) or plain.get((scenario, FCFS, *named))


def _phases(outcome: Outcome) -> list[Row]:
    table = outcome.columns
    completed_per_s = len(table) / float((table.arrival_s + table.latency_s).max() - table.arrival_s.min())
    rows = phase_rows(table, len(table.replicas))
    return [*rows[:-1], {**rows[-1], "completed_per_s": completed_per_s}]


def _place(case: Case) -> tuple[str, ...]:
    labels = {"scenario": case.scenario.name, **case.policies.labels()}
    return tuple(labels[name] for name in NAMES)


def _parameters(
    experiment: Experiment, options: Options, scenarios: str, outcomes: Sequence[Outcome]
) -> dict[str, object]:
    traces = f" --traces {options.traces}" if options.traces is not None else ""
    chosen = f' --scenario "{scenarios}"' if scenarios != "*" else ""
    return {
        "description": experiment.description,
        "command": f"fairway-serve simulate {experiment.name} --seed {options.seed}{traces}{chosen}",
        **experiment.parameters,
        "runs": len(outcomes),
        "requests": sum(len(outcome.columns) for outcome in outcomes),
        "cpu_s": round(sum(outcome.cpu_s for outcome in outcomes), 3),
    }


def _runs(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Columns]]:
    """Policies are told by what they differ in."""
    places = [_place(outcome.case) for outcome in outcomes]
    differ = [column for column in range(1, len(NAMES)) if len({place[column] for place in places}) > 1]
    runs: dict[str, dict[str, Columns]] = {}
    for place, outcome in zip(places, outcomes, strict=True):
        label = " / ".join(place[column] for column in differ or range(1, len(NAMES)))
        runs.setdefault(place[0], {})[label] = outcome.columns
    return runs
