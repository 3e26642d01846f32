"""How long does a routing decision take, by prompt length and number of replicas?

Times `RoutingState.decide` alone (one walk of the prefix index, one view a replica, the choice, the reservation) and,
beside it, hashing the prompt into KV block keys, which is done once a request whatever the number of replicas.
Tokenising, HTTP and Serve's own part are not in it. Times are CPU time of the thread, so that other work on the machine
counts little.

    python benchmarks/decision_time.py
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import typer

from serve_app.config import RouterSettings
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.block_hashes import BlockHasher
from serve_app.router.lifecycle import Closed, LifecycleBatch
from serve_app.router.routing_state import RouteRequest, RoutingState

BLOCK_SIZE_TOKENS = 16
REPLICAS = (1, 10, 100)
PROMPT_TOKENS = (1_000, 8_000, 64_000)
WARM_UP = 64
"""Decisions before the timing; more than the residual needs to be in use."""


def main(repeats: int = 300, seed: int = 0) -> None:
    """Print one row for each prompt length and number of replicas, times in microseconds."""
    rng = np.random.default_rng(seed)
    hasher = BlockHasher(BLOCK_SIZE_TOKENS)
    print(f"python benchmarks/decision_time.py --repeats {repeats} --seed {seed}\n")
    print("| prompt tokens | replicas | decide p50 us | decide p99 us | hash p50 us |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for num_tokens in PROMPT_TOKENS:
        prompt = rng.integers(0, 30_000, num_tokens).tolist()
        hashes = hasher.hashes(prompt)
        hash_us = _times_us(partial(hasher.hashes, prompt), max(3, repeats // 30))
        for num_replicas in REPLICAS:
            decide_us = _decision_times_us(_state(hashes, num_replicas, rng), num_tokens, hashes, repeats)
            print(
                f"| {num_tokens:,} | {num_replicas} | {statistics.median(decide_us):.0f} | "
                f"{np.percentile(decide_us, 99):.0f} | {statistics.median(hash_us):.0f} |",
                flush=True,
            )


def _state(hashes: tuple[bytes, ...], num_replicas: int, rng: np.random.Generator) -> RoutingState:
    """Every replica holds a random share of the prompt; one holds all of it, so that every walk goes to its end."""
    state = RoutingState(RouterSettings(), PrefillProfile.flat(), BLOCK_SIZE_TOKENS)
    state.set_replicas(f"replica-{number}" for number in range(num_replicas))
    for number in range(num_replicas):
        held = len(hashes) if number == 0 else int(rng.integers(0, len(hashes)))
        state.index.stored(f"replica-{number}", hashes[:held])
    return state


def _decision_times_us(state: RoutingState, num_tokens: int, hashes: tuple[bytes, ...], repeats: int) -> list[float]:
    ids = [row["replica_id"] for row in state.snapshot(0.0)["replicas"]]
    times_us: list[float] = []
    for number in range(WARM_UP + repeats):
        request = RouteRequest(str(number), num_tokens, hashes)
        begun = time.thread_time()
        decision = state.decide(request, ids, float(number))
        times_us.append((time.thread_time() - begun) * 1e6)
        closed = Closed(str(number), 200, "finished", 1.0, 0.5, num_tokens, decision.hit_tokens, 4)
        # Half of the requests stay open, as in a loaded cluster; the others teach the residual.
        if number % 2:
            state.on_batch(LifecycleBatch(decision.replica_id, "one", number, (closed,)), float(number))
    return times_us[WARM_UP:]


def _times_us(call: Callable[[], object], repeats: int) -> list[float]:
    times_us = []
    for _ in range(repeats):
        begun = time.thread_time()
        call()
        times_us.append((time.thread_time() - begun) * 1e6)
    return times_us


if __name__ == "__main__":
    typer.run(main)
