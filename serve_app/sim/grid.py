"""Many runs: in several processes, and resumable.

A case is one scenario under one set of policies. Processes take cases one by one; a process keeps the scenario that it
built last, with its prompts' hashes, as cases come sorted by scenario. With a directory to resume from, each finished
case is a file there, named by all that decides its result: scenario, policies, and the source code that was run.
"""

import functools
import gc
import hashlib
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve_app.sim.arrivals import Arrival
from serve_app.sim.chosen import Policies
from serve_app.sim.columns import Columns, columns, load_columns, save_columns
from serve_app.sim.prompts import HashedPrompts
from serve_app.sim.run import Cluster, Simulation

PACKAGE = Path(__file__).resolve().parents[1]
SIMULATED_ROOMS = ("emulation", "policies", "router", "sim")
"""Folders whose code decides what a run gives, beside the settings."""
ONLY_LOOKS = (
    "catalogue.py",
    "experiment.py",
    "experiments",
    "grid.py",
    "metrics.py",
    "plots.py",
    "report.py",
    "show.py",
    "summary.py",
    "tables.py",
)
"""Parts of `sim` that say what is run and look at what came out."""


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A scenario's arrivals and the cluster that they meet."""

    arrivals: Sequence[Arrival]
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload on a cluster; `build` is a pure function of its arguments, so that any process can call it."""

    name: str
    build: "functools.partial[Built]"
    """Of a function at a module's top level, with plain values or dataclasses as arguments."""
    seed: int
    """Of the policies' random choices."""

    def key(self) -> str:
        """All that decides what is built, as text."""
        function = self.build.func
        return f"{function.__module__}.{function.__qualname__} {self.build.args} {self.build.keywords} {self.seed}"


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    scenario: Scenario
    policies: Policies


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What came of a case."""

    case: Case
    columns: Columns
    cpu_s: float
    """CPU seconds of the run, without building its scenario; of one that was read, what it took when it was run."""
    was_read: bool
    """Whether it was finished before."""


def run_cases(
    cases: Sequence[Case],
    jobs: int,
    resume: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Run all cases; returns their outcomes in the order of the cases.

    Args:
        jobs: processes, at least 1; with 1 everything runs in this one.
        resume: directory of finished cases, made if absent; what is there is read instead of run.
        progress: called with (cases done, cases in all).

    Raises:
        ValueError: jobs is below 1, or a scenario or its policies are wrong.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1")
    if resume is not None:
        resume.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome | None] = [None] * len(cases)
    progress(0, len(cases))
    for done, (index, found, cpu_s, was_read) in enumerate(_results(cases, jobs, resume), start=1):
        outcomes[index] = Outcome(cases[index], found, cpu_s, was_read)
        progress(done, len(cases))
    return [outcome for outcome in outcomes if outcome is not None]


def source_fingerprint() -> str:
    """12 hex digits of the code and settings that decide what a run gives."""
    digest = hashlib.sha256()
    files = [PACKAGE / "config.py", PACKAGE / "settings.py"]
    files += [path for room in SIMULATED_ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
    looking = {PACKAGE / "sim" / name for name in ONLY_LOOKS}
    for path in files:
        if looking.isdisjoint((path, *path.parents)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


CPU_DECIMALS = 3
CPU_SECONDS = ".seconds"
"""Suffix of the file beside a finished run's that says how long it took."""

Result = tuple[int, Columns, float, bool]
_Task = tuple[int, Case, Path | None]


def _results(cases: Sequence[Case], jobs: int, resume: Path | None) -> Iterator[Result]:
    fingerprint = source_fingerprint() if resume is not None else ""
    tasks = [
        (index, case, resume / _file_name(case, fingerprint) if resume else None) for index, case in enumerate(cases)
    ]
    if jobs == 1 or len(tasks) < 2:
        yield from map(_run, tasks)
        return
    # Spawned, as a fork would copy threads of libraries that are loaded here.
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(tasks)), _start_worker) as pool:
        yield from pool.imap_unordered(_run, tasks)


def _start_worker() -> None:
    """The parent handles an interrupt, and ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.WARNING)


def _run(task: _Task) -> Result:
    index, case, path = task
    if path is not None and path.exists():
        return index, load_columns(path), _read_cpu_s(path), True
    built, prompts = _built(case.scenario)
    started_s = time.process_time()
    simulation = Simulation(built.cluster, case.policies, case.scenario.seed, prompts)
    replica_ids = list(simulation.replicas)
    with _collector_off():
        found = columns(simulation.run(built.arrivals), replica_ids)
    cpu_s = round(time.process_time() - started_s, CPU_DECIMALS)  # as it is kept, so that a resumed sum is the same
    if path is not None:
        path.with_suffix(CPU_SECONDS).write_text(f"{cpu_s:.{CPU_DECIMALS}f}")
        save_columns(path, found)  # last, as it says that the run is finished
    return index, found, cpu_s, False


def _read_cpu_s(path: Path) -> float:
    beside = path.with_suffix(CPU_SECONDS)
    return float(beside.read_text()) if beside.exists() else 0.0


@contextmanager
def _collector_off() -> Iterator[None]:
    """Garbage in cycles waits for the end of the run: looking for it costs a fifth of one."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_last_built: dict[str, tuple[Built, HashedPrompts]] = {}


def _built(scenario: Scenario) -> tuple[Built, HashedPrompts]:
    """The scenario and the hashes of its prompts; the last one is kept, by what it is built from."""
    key = scenario.key()
    if key not in _last_built:
        _last_built.clear()
        built = scenario.build()
        _last_built[key] = built, HashedPrompts(built.cluster.engine.block_size_tokens)
    return _last_built[key]


def _file_name(case: Case, fingerprint: str) -> str:
    digest = hashlib.sha256(f"{case.scenario.key()} {case.policies} {fingerprint}".encode()).hexdigest()
    return f"{case.scenario.name}-{digest[:16]}.npz"
