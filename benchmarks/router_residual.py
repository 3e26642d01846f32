"""Which features and which model predict the TTFT best, out of sample, and how long does a slow replica fool them?

The simulator runs each scenario under the default policies and keeps what the router saw of every request when it
placed it. Then each model gets the same requests in the same order: it predicts when a request is placed, and learns
when its first token is heard of, as it would in the router. All requests count, the first ones included, for which a
model is cold and the explicit terms stand alone. The placements are those that the chosen model led to; another model
would have led to others. Models, in the order of the table:

- explicit alone: miss, hit and queue seconds, nothing learned;
- former: the regression before, by gradient steps on miss tokens, hit tokens, load and open requests, one for all
  replicas, its correction within the bound of a choice; unbounded: its whole correction;
- chosen: `serve_app/router/estimator.py` as it is; one a replica: the same with a model for each replica; without
  ahead_s: the same without that feature;
- adaptive tree: a Hoeffding adaptive tree on the chosen features, one for all replicas.

In `slow` the steps of one replica take twice as long from 60 s on; a second table shows that replica every 10 s.

    python benchmarks/router_residual.py
    python benchmarks/router_residual.py --scenarios gsp-12,slow --small
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # vLLM reads it when it is imported; a test that imports this module must not be silenced
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import typer
from router_residual_models import CHOSEN, EXPLICIT, MODELS, FloatArray, Sample, predictions_s

from serve_app.config import RouterSettings
from serve_app.emulation.step_time import prefill_table
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.decisions import Decision, Record, RouteRequest
from serve_app.router.lifecycle import LifecycleBatch
from serve_app.router.routing_state import RoutingState
from serve_app.sim.chosen import Policies
from serve_app.sim.experiments import routing
from serve_app.sim.experiments.base import Options
from serve_app.sim.grid import Built, Scenario
from serve_app.sim.network import Fault
from serve_app.sim.run import Simulation
from serve_app.sim.scenarios.cluster import build_gsp, cluster_of

NAMES = ("gsp-8", "gsp-12", "chat-busy", "longdoc-busy", "conversation", "slow")
NEEDS_DATA = "conversation"
SLOW, SLOW_REPLICA = Fault(routing.FAULT_AT_S, 1, "slow", factor=2.0), "replica-1"
SLOW_RATE_PER_S = 10.0
WINDOW_S = 10.0
POLICIES = Policies(settings={"decisions_kept": 100_000})
"""The defaults, with a ring that forgets no request before its first token."""


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario."""

    scenario: str
    requests: int
    mean_ttft_s: float
    mae_s: Mapping[str, float]
    """By model, over all requests."""


@dataclass(frozen=True, slots=True)
class Window:
    """`WINDOW_S` seconds of a run with a slow replica; figures of requests that were placed on it in this time."""

    from_s: float
    placed: int
    """On all replicas."""
    share: float
    """Of them, on the slow one."""
    mean_ttft_s: float
    mae_s: float
    bias_s: float
    """Observed minus predicted."""
    explicit_mae_s: float
    explicit_bias_s: float


class RecordingState(RoutingState):
    """Decides and learns as ever, and keeps what it saw of every request."""

    def __init__(self, settings: RouterSettings, profile: PrefillProfile, block_size_tokens: int | None) -> None:
        super().__init__(settings, profile, block_size_tokens)
        self.samples: list[Sample] = []
        """In the order in which first tokens were heard of."""
        self._placed: dict[str, Record] = {}

    def decide(
        self, request: RouteRequest, replica_ids: Sequence[str], now_s: float, router: str | None = None
    ) -> Decision:
        """As `RoutingState.decide`."""
        decision = super().decide(request, replica_ids, now_s, router)
        record = self.decisions.get(request.request_id)
        assert record is not None, "the newest decision is in the ring"
        self._placed[request.request_id] = record
        return decision

    def on_batch(self, batch: LifecycleBatch, now_s: float) -> None:
        """As `RoutingState.on_batch`."""
        super().on_batch(batch, now_s)
        for event in batch.events:
            record = self._placed.get(event.request_id)
            if record is not None and record.observed.ttft_s is not None:
                del self._placed[event.request_id]
                self.samples.append(_sample(record, record.observed.ttft_s, now_s))


def recorded(built: Built, seed: int, progress: Callable[[int, int], None] | None = None) -> list[Sample]:
    """Run the scenario under `POLICIES`; its requests in the order in which first tokens were heard of."""
    simulation = Simulation(built.cluster, POLICIES, seed)
    engine = built.cluster.engine
    table = prefill_table(engine.device, engine.max_step_tokens, engine.device.kv_blocks * engine.block_size_tokens)
    state = RecordingState(POLICIES.router_settings(seed), PrefillProfile(table), engine.block_size_tokens)
    state.set_replicas(simulation.replicas)
    simulation.routing = state
    simulation.run(built.arrivals, progress)
    return state.samples


def row_of(scenario: str, samples: Sequence[Sample], predicted: Mapping[str, FloatArray]) -> Row:
    """Args: predicted: by model, (n,) seconds in the order of `samples`."""
    ttft_s = np.array([sample.ttft_s for sample in samples])
    mae_s = {name: float(np.abs(ttft_s - one).mean()) for name, one in predicted.items()}
    return Row(scenario, len(samples), float(ttft_s.mean()), mae_s)


def windows_of(samples: Sequence[Sample], predicted: Mapping[str, FloatArray], replica_id: str) -> list[Window]:
    """The run in windows of `WINDOW_S` by when requests were placed, those with none on the replica left out."""
    placed = np.floor(np.array([sample.placed_s for sample in samples]) / WINDOW_S)
    is_there = np.array([sample.replica_id == replica_id for sample in samples])
    ttft_s = np.array([sample.ttft_s for sample in samples])
    chosen_s, explicit_s = ttft_s - predicted[CHOSEN], ttft_s - predicted[EXPLICIT]
    windows = []
    for number in np.unique(placed[is_there]):
        here = is_there & (placed == number)
        num_placed = int((placed == number).sum())
        windows.append(
            Window(
                from_s=float(number) * WINDOW_S,
                placed=num_placed,
                share=int(here.sum()) / num_placed,
                mean_ttft_s=float(ttft_s[here].mean()),
                mae_s=float(np.abs(chosen_s[here]).mean()),
                bias_s=float(chosen_s[here].mean()),
                explicit_mae_s=float(np.abs(explicit_s[here]).mean()),
                explicit_bias_s=float(explicit_s[here].mean()),
            )
        )
    return windows


def scenarios(options: Options, *, small: bool) -> dict[str, Scenario]:
    """By name; `conversation` is there only where the options have data.

    Args: small: a quarter of the prompts with generated prefixes.
    """
    params, seed = routing.SMALL_GSP if small else routing.GSP, options.seed
    rates = {"gsp-8": (8.0, ()), "gsp-12": (12.0, ()), "slow": (SLOW_RATE_PER_S, (SLOW,))}
    generated = [
        Scenario(name, partial(build_gsp, replace(params, rate_per_s=rate), cluster_of(faults=faults), seed), seed)
        for name, (rate, faults) in rates.items()
    ]
    others = (routing.chat_scenarios, routing.longdoc_scenarios, routing.trace_scenarios)
    known = {one.name: one for one in [*generated, *(one for make in others for one in make(options))]}
    return {name: known[name] for name in NAMES if name in known}


def main(
    names: Annotated[
        str, typer.Option("--scenarios", help=f"Which to run, by commas: {', '.join(NAMES)}. Default: all it can.")
    ] = "",
    data: Annotated[Path | None, typer.Option(help=f"Folder of the recorded data, for {NEEDS_DATA}.")] = None,
    small: Annotated[bool, typer.Option("--small", help="A quarter of the requests of gsp and slow.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and router.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.", dir_okay=False)] = None,
) -> None:
    """Print the mean absolute error of each model in each scenario, in seconds, and the slow replica over time."""
    known = scenarios(Options(seed, data=data), small=small)
    wanted = names.split(",") if names else list(known)
    for name in wanted:
        _refuse_unknown(name, known)
    print(f"python benchmarks/router_residual.py --scenarios {','.join(wanted)}{' --small' * small} --seed {seed}\n")
    rows, windows = report({name: known[name] for name in wanted})
    if json_path is not None:
        written = {"rows": [asdict(one) for one in rows], "slow": [asdict(one) for one in windows]}
        json_path.write_text(json.dumps(written, indent=2) + "\n")


def report(wanted: Mapping[str, Scenario]) -> tuple[list[Row], list[Window]]:
    """Run the scenarios and print the tables as they come; windows are those of `slow`."""
    print(f"| scenario | requests | mean TTFT s | {' | '.join(MODELS)} |\n| --- |" + " ---: |" * (2 + len(MODELS)))
    rows, windows = list[Row](), list[Window]()
    for name, scenario in wanted.items():
        samples = recorded(scenario.build(), scenario.seed, partial(_progress, name))
        predicted = _predicted(name, samples, POLICIES.router_settings(scenario.seed))
        rows.append(row_of(name, samples, predicted))
        print(_line(rows[-1]), flush=True)
        if name == "slow":
            windows = windows_of(samples, predicted, SLOW_REPLICA)
    if windows:
        print(f"\n{_windows_table(windows)}")
    return rows, windows


def _refuse_unknown(name: str, known: Mapping[str, Scenario]) -> None:
    if name == NEEDS_DATA and name not in known:
        raise typer.BadParameter(f"{name} needs --data, the folder of the recorded data", param_hint="--scenarios")
    if name not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(NAMES)}", param_hint="--scenarios")


def _predicted(name: str, samples: Sequence[Sample], settings: RouterSettings) -> dict[str, FloatArray]:
    predicted = {}
    for model, make in MODELS.items():
        print(f"{name}: {model} ...", file=sys.stderr)
        predicted[model] = predictions_s(make(settings), samples)
    return predicted


def _sample(record: Record, ttft_s: float, heard_s: float) -> Sample:
    decision = record.decision
    return Sample(
        placed_s=decision.decided_at_s,
        heard_s=heard_s,
        replica_id=decision.replica_id,
        features=record.features,
        hit_tokens=decision.hit_tokens,
        miss_tokens=decision.prompt_tokens - decision.hit_tokens,
        explicit_s=record.explicit_s,
        predicted_s=decision.predicted_s,
        ttft_s=ttft_s,
    )


def _progress(name: str, done: int, total: int) -> None:
    if done % 500 == 0:
        print(f"{name}: {done:,} of {total:,} requests ...", file=sys.stderr)


def _line(row: Row) -> str:
    errors = " | ".join(f"{row.mae_s[name]:.3f}" for name in MODELS)
    return f"| {row.scenario} | {row.requests:,} | {row.mean_ttft_s:.3f} | {errors} |"


def _windows_table(windows: Sequence[Window]) -> str:
    heading = ("from s", "placed", "share", "mean TTFT s", "MAE s", "bias s", "explicit MAE s", "explicit bias s")
    lines = [
        f"| {one.from_s:.0f} | {one.placed} | {one.share:.0%} | {one.mean_ttft_s:.2f} | {one.mae_s:.2f} | "
        f"{one.bias_s:+.2f} | {one.explicit_mae_s:.2f} | {one.explicit_bias_s:+.2f} |"
        for one in windows
    ]
    return "\n".join([f"| {' | '.join(heading)} |", "|" + " ---: |" * len(heading), *lines])


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    typer.run(main)
