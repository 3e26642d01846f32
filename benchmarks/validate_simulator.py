"""Does the simulator say what an engine does? One trace on both, by policies, medians of five runs.

The engines are vLLM complete on the emulated GPU, and on SmolLM2 on one core of this machine. Requests, times, KV
blocks, step budget, policies and prefill table are the same on both sides; the simulator's step times are measured on
the engine itself before the runs, a request at a time, and nothing is fitted to the runs. Runs of the policies are
interleaved. With `--traces 5` each of five runs has a trace of its own, the same for all policies: the runs then differ
by themselves, so look at the ratios of the single runs.

    python benchmarks/validate_simulator.py --engine emulated
    python benchmarks/validate_simulator.py --engine emulated --engine cpu --keep runs --json validation.json

Beforehand: `fairway-serve prepare-model`, and a quiet machine: the CPU engine wants a core for itself. For the CPU
engine that means few threads, as `configs/local.yaml` says; this script sets them.
"""

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

# vLLM reads them when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import typer
from validation_engines import SETUPS, EngineError, Setup, replay, running
from validation_report import Pair, read_pair, rows_of, table, targets_of, write_pair
from validation_trace import requests, timed

from serve_app.emulation.settings import EmulationSettings
from serve_app.emulation.step_time import prefill_table
from serve_app.sim.arrivals import Arrival, at_once
from serve_app.sim.chosen import Policies
from serve_app.sim.columns import Served
from serve_app.sim.engine import EngineParams
from serve_app.sim.report import Results, versions, write_json
from serve_app.sim.run import Cluster, Simulation

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Place = tuple[int, int, str]
"""Number of the run, seed of its trace, name of the policies."""
POLICIES: Mapping[str, Policies] = {
    "fcfs": Policies("round-robin", "fcfs", "lru"),
    "lpm": Policies("round-robin", "lpm", "lru"),
    "fairway": Policies("round-robin", "fairway", "lru"),
    "fairway-rlt": Policies("round-robin", "fairway", "rlt"),
}
"""One replica: the router has no choice. RLT draws at random, so its medians differ from run to run by themselves."""
APPROXIMATIONS = (
    "Simulator: scheduling, sampling and the way between client and engine take no time of their own; what they take "
    "on the engine is in the step times only as far as a lone request shows it.",
    "Both engines run without asynchronous scheduling, as vLLM does on CPUs; on GPUs it is the default.",
    "No HTTP and no tokenising: the client hands token ids to vLLM's `AsyncLLM`.",
    "CPU engine: the step-time model is fitted to requests alone; what a step of many decodes costs beyond theirs is "
    "not measured.",
)


class EngineName(StrEnum):
    """The engines by name."""

    EMULATED = "emulated"
    CPU = "cpu"


def main(
    engine: Annotated[list[EngineName], typer.Option(help="Which engine; give it twice for both.")],
    runs: Annotated[int, typer.Option(min=1, help="Runs of each policies.")] = 5,
    traces: Annotated[int, typer.Option(min=1, help="Traces that the runs take in turn.")] = 1,
    policies: Annotated[list[str] | None, typer.Option(help="Only these of fcfs, lpm, fairway, fairway-rlt.")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Directory of finished runs: those in it are not run again.", file_okay=False)
    ] = None,
    measure_again: Annotated[
        bool, typer.Option("--measure-again", help="Measure the engine anew and simulate finished runs with that.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Where to write the results.", dir_okay=False)] = None,
) -> None:
    """Run a trace on an engine and on the simulator and compare the times to first token.

    The table goes to standard output, progress to standard error. A run on the emulated engine takes about 25 s, on the
    CPU engine about a minute; each of both has 4 x RUNS.

    Example: python benchmarks/validate_simulator.py --engine cpu --runs 1 --keep /tmp/runs
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        if unknown := set(policies or ()) - POLICIES.keys():
            raise typer.BadParameter(f"--policies has {sorted(unknown)}; they must be of {', '.join(POLICIES)}")
        chosen = [name for name in POLICIES if policies is None or name in policies]
        places = [(number, number % traces, name) for number in range(runs) for name in chosen]
        for name in engine:
            try:
                asyncio.run(_run_missing(name.value, places, directory))
                if measure_again:
                    asyncio.run(_simulate_again(name.value, places, directory))
            except EngineError as error:
                raise typer.BadParameter(str(error)) from error
        pairs = [read_pair(_path(directory, name.value, *place)) for name in engine for place in places]
    print(table(pairs))
    if json is not None:
        write_json(json, _results(pairs, engine, runs, traces))


def _path(directory: Path, engine: str, number: int, trace: int, policies: str) -> Path:
    return directory / f"{engine}-run{number}-trace{trace}-{policies}.json"


async def _run_missing(name: str, places: Sequence[Place], directory: Path) -> None:
    """All runs of one engine that the directory lacks, one after the other, on one engine for each policies."""
    missing = [place for place in places if not _path(directory, name, *place).exists()]
    if not missing:
        return
    setup = SETUPS[name]
    async with AsyncExitStack() as stack:
        engines, device = await _start(setup, list(dict.fromkeys(place[2] for place in missing)), stack)
        _say(f"{name}: all engines are up")
        for done, place in enumerate(missing):
            pair = await _pair(name, place, engines[place[2]], device)
            write_pair(_path(directory, name, *place), pair)
            _say(f"{name}: {done + 1} of {len(missing)} runs\n{table([pair]).splitlines()[-1]}")


async def _simulate_again(name: str, places: Sequence[Place], directory: Path) -> None:
    """Measure a fresh engine and put a simulation with that in the place of every finished one."""
    async with AsyncExitStack() as stack:
        _, device = await _start(SETUPS[name], [places[0][2]], stack)
    for place in places:
        pair = read_pair(_path(directory, name, *place))
        at_s = {one.request_id: one.arrival_s for one in pair.measured}
        asked = requests(SETUPS[name].trace, np.random.default_rng([pair.trace, 0]))
        arrivals = [replace(one, at_s=at_s[one.request_id]) for one in asked]
        simulated = _simulated(_params(name, device), POLICIES[pair.policies], pair.number, arrivals)
        write_pair(_path(directory, name, *place), replace(pair, device=device, simulated=simulated))


def _params(name: str, device: EmulationSettings) -> EngineParams:
    return replace(SETUPS[name].params, device=device)


async def _start(
    setup: Setup, chosen: Sequence[str], stack: AsyncExitStack
) -> "tuple[dict[str, AsyncLLM], EmulationSettings]":
    """An engine for each policies; the first is measured, and all others expect prefills to take what it took."""
    engines: dict[str, AsyncLLM] = {}
    device = setup.params.device
    for name in chosen:
        policies = POLICIES[name]
        # The engine's own device stays as its setup says: being measured must not make the emulated one slower.
        policy = policies.engine_policy(0, _prefill_table(setup.params, device))
        engines[name] = await stack.enter_async_context(running(setup.make_config(setup.params, policy)))
        if len(engines) == 1:
            _say("measuring one request at a time")
            device = await setup.measure(engines[name], setup.params)
            _say(f"the simulator's device is {device.model_dump_json(exclude_defaults=True)}")
    return engines, device


async def _pair(name: str, place: Place, engine: "AsyncLLM", device: EmulationSettings) -> Pair:
    (number, trace, policies), setup = place, SETUPS[name]
    params = _params(name, device)
    asked = requests(setup.trace, np.random.default_rng([trace, 0]))
    arrivals = timed(asked, _capacity_per_s(params, asked), np.random.default_rng([trace, 1]))
    measured, late_s = await replay(engine, arrivals)
    simulated = _simulated(params, POLICIES[policies], number, arrivals)
    return Pair(name, policies, number, trace, device, late_s, measured, simulated)


def _capacity_per_s(params: EngineParams, asked: Sequence[Arrival]) -> float:
    """Requests a second that the engine completes under FCFS when all are there at once."""
    served = _simulated(params, POLICIES["fcfs"], 0, at_once(asked))
    return len(served) / max(one.latency_s for one in served)


def _simulated(params: EngineParams, policies: Policies, seed: int, arrivals: Sequence[Arrival]) -> list[Served]:
    return Simulation(Cluster(params, kv_events=False), policies, seed).run(arrivals)


def _prefill_table(params: EngineParams, device: EmulationSettings) -> Any:
    return prefill_table(device, params.max_step_tokens, device.kv_blocks * params.block_size_tokens)


def _results(pairs: Sequence[Pair], engines: Sequence[EngineName], runs: int, traces: int) -> Results:
    names = {name: {**policies.labels(), "router": "-"} for name, policies in POLICIES.items()}
    chosen = " ".join(f"--engine {name.value}" for name in engines)
    devices = {name.value: [pair.device for pair in pairs if pair.engine == name.value] for name in engines}
    return Results(
        experiment="validation",
        seed=0,
        parameters={
            "description": "The same requests on the simulator and on engines; each number is the median of the runs.",
            "command": f"python benchmarks/validate_simulator.py {chosen} --runs {runs} --traces {traces}",
            "step_base_s": {name: [one.step_base_s for one in each] for name, each in devices.items()},
            "s_per_token": {name: [one.s_per_token for one in each] for name, each in devices.items()},
        },
        versions=versions(),
        rows=rows_of(pairs, names),
        targets=targets_of(pairs, {name: setup.tolerance for name, setup in SETUPS.items()}),
        approximations=APPROXIMATIONS,
    )


def _say(line: str) -> None:
    typer.echo(line, err=True)


if __name__ == "__main__":
    typer.run(main)
