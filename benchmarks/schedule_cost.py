"""What does our scheduler add to vLLM's `schedule()`, by the number of waiting requests?

Drives vLLM's stock AsyncScheduler and ours in one process over the same arrivals, step by step in turn, without a model
and with two steps in flight, as vLLM does on a GPU. Prompts have 8,000 tokens in blocks of 16; half of them continue
one of 64 documents (hits where it is cached, 512 tokens to compute), half share nothing. 64 requests run, and the pool
of 65,536 blocks has been filled before, so that every new block is an evicted one. Two kinds of steps:

- admits: each running request ends after 64 tokens, so that about one slot is free in every step; as many requests are
  added as were admitted, and `waiting` of them wait besides the last arrival;
- full: all slots are taken by decodes that don't end; `waiting` requests wait, and none is admitted.

`added` is the CPU time that our `schedule()` spends outside of vLLM's own, which it calls: the order, but not the
eviction. `whole step` is schedule, update and adding the arrivals together, wherever our code hides in it. Times are
CPU time of the thread; the garbage collector is off, as it stops both alike.

    python benchmarks/schedule_cost.py
"""

import cProfile
import gc
import io
import os
import pstats
from collections.abc import Sequence
from typing import Annotated

# vLLM reads it when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import typer
from schedule_sides import (
    NUM_DOCUMENTS,
    NUM_RUNNING,
    POOL_BLOCKS,
    PROMPT_BLOCKS,
    InnerTimed,
    OursTimed,
    Prompts,
    Side,
    Times,
    scheduler_config,
)

from serve_app.config import EnginePolicy

ENDLESS = 50_000
"""Output tokens of a request that doesn't end during the measurement."""
WARM_UP_STEPS = 3 * NUM_RUNNING
MAX_RATIO_IDLE = 1.03
"""Bound of ours / stock where nothing waits."""
MAX_ADDED_MS = {1_000: (1.0, 3.0), 10_000: (15.0, float("inf"))}
"""Bounds of the added milliseconds by the number of waiting requests: median, 99th percentile."""


def main(
    waiting: Annotated[str, typer.Option(help="Numbers of waiting requests.")] = "0,100,1000,10000",
    modes: Annotated[str, typer.Option(help="Kinds of steps.")] = "admits,full",
    steps: Annotated[int, typer.Option(min=20, help="Measured steps a row.")] = 500,
    ordering: str = "fairway-carried",
    eviction: str = "adaptive",
    protect_waiting: bool = True,
    seed: int = 0,
    profile: Annotated[bool, typer.Option(help="Print where our schedule() spends its time; slows it.")] = False,
) -> None:
    """Print one row for each kind of steps and number of waiting requests, milliseconds a step, and the bounds."""
    fields = {"ordering": ordering, "eviction": eviction, "protect_waiting": protect_waiting}
    policy = EnginePolicy.model_validate({**EnginePolicy().model_dump(), **fields, "seed": seed})
    flag = "--protect-waiting" if protect_waiting else "--no-protect-waiting"
    print(f"python benchmarks/schedule_cost.py --waiting {waiting} --modes {modes} --steps {steps} "
          f"--ordering {ordering} --eviction {eviction} {flag} --seed {seed}\n")  # fmt: skip
    print("| steps | waiting | stock p50 | stock p99 | ours p50 | ours p99 | ours / stock | added p50 | added p99 "
          "| whole step, mean: stock | ours | admitted a step: stock | ours |")  # fmt: skip
    print("| --- |" + " ---: |" * 12)
    verdicts: list[str] = []
    for mode in modes.split(","):
        for num_waiting in map(int, waiting.split(",")):
            profiler = cProfile.Profile() if profile else None
            stock, ours = _measured(mode, num_waiting, steps, policy, Prompts(seed), profiler)
            print(_row(mode, num_waiting, stock, ours), flush=True)
            verdicts += _verdicts(mode, num_waiting, stock, ours)
            if profiler is not None:
                print(_profiled(profiler), flush=True)
    print("\n" + "\n".join(verdicts))


def _measured(
    mode: str, waiting: int, steps: int, policy: EnginePolicy, prompts: Prompts, profiler: cProfile.Profile | None
) -> tuple[Times, Times]:
    """Stock and ours over the same arrivals, each first in every other step."""
    if mode not in ("admits", "full"):
        raise typer.BadParameter(f"{mode!r} is neither admits nor full", param_hint="--modes")
    config = scheduler_config(policy)
    sides = [Side(scheduler_cls, config, prompts) for scheduler_cls in (InnerTimed, OursTimed)]
    for side in sides:
        _prepare(side, mode, waiting)
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(WARM_UP_STEPS + steps):
        if number == WARM_UP_STEPS:
            for side in sides:
                side.times = Times()
        for side in sides if number % 2 else reversed(sides):
            is_profiled = profiler is not None and side is sides[1] and number >= WARM_UP_STEPS
            seconds = side.fill(waiting + 1, NUM_RUNNING) if mode == "admits" else 0.0
            side.times.whole_ms.append((seconds + side.step(profiler if is_profiled else None)) * 1e3)
            if mode == "full":
                assert side.num_waiting == waiting, "a request was admitted or lost although every slot is taken"
    gc.enable()
    gc.unfreeze()
    return sides[0].times, sides[1].times


def _prepare(side: Side, mode: str, waiting: int) -> None:
    """Fill the pool with the blocks of requests that end at once, take every slot, and let `waiting` wait."""
    for _ in range(2 * POOL_BLOCKS // PROMPT_BLOCKS):
        side.add(1)
        side.step()
    while side.scheduler.has_unfinished_requests():
        side.step()
    for number in range(NUM_RUNNING):
        # They end one after another, as they do once they were admitted one after another.
        side.add(ENDLESS if mode == "full" else NUM_RUNNING + number, document=number % NUM_DOCUMENTS)
        side.step()
    while side.num_waiting:
        side.step()
    assert len(side.scheduler.running) == NUM_RUNNING
    side.fill(waiting, NUM_RUNNING)


def _row(mode: str, waiting: int, stock: Times, ours: Times) -> str:
    values: list[float] = []
    for times in (stock, ours):
        values += [_p50(times.schedule_ms), _p99(times.schedule_ms)]
    values += [_p50(ours.schedule_ms) / _p50(stock.schedule_ms), _p50(ours.added_ms), _p99(ours.added_ms)]
    values += [float(np.mean(times.whole_ms)) for times in (stock, ours)]
    values += [times.num_admitted / len(times.whole_ms) for times in (stock, ours)]
    return f"| {mode} | {waiting:,} | " + " | ".join(f"{value:.3f}" for value in values) + " |"


def _verdicts(mode: str, waiting: int, stock: Times, ours: Times) -> list[str]:
    found: list[tuple[str, float, float]] = []
    if waiting == 0:
        stock_ms = _p50(stock.schedule_ms)
        found.append(("ours / stock, p50", _p50(ours.schedule_ms) / stock_ms, MAX_RATIO_IDLE))
        found.append(
            ("without eviction, (stock + added) / stock", 1.0 + _p50(ours.added_ms) / stock_ms, MAX_RATIO_IDLE)
        )
    elif waiting in MAX_ADDED_MS:
        median_ms, tail_ms = MAX_ADDED_MS[waiting]
        found.append(("added ms, p50", _p50(ours.added_ms), median_ms))
        found.append(("added ms, p99", _p99(ours.added_ms), tail_ms))
    return [
        f"{mode}, {waiting:,} waiting: {what} {value:.3f}, bound {bound:g}: {'met' if value <= bound else 'MISSED'}"
        for what, value, bound in found
        if bound < float("inf")
    ]


def _profiled(profiler: cProfile.Profile) -> str:
    """What takes most, and what of it is ours."""
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    stats.sort_stats("tottime").print_stats(12)
    stats.sort_stats("cumulative").print_stats("serve_app", 16)
    return text.getvalue()


def _p50(values: Sequence[float]) -> float:
    return float(np.percentile(values, 50))


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


if __name__ == "__main__":
    typer.run(main)
