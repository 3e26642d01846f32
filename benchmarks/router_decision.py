"""How long does a routing decision take, from a prompt's token ids to the ranked choice?

Times `BlockHasher.hashes` and `RoutingState.decide` (one walk of the prefix index, one view a replica, the choice, the
reservation) and both together. Half of each prompt is held by three replicas. A fresh prompt was never hashed before; a
shared one begins, as in RAG, with a document of half its length that others have asked about, so that the hasher's memo
knows it. Tokenising, HTTP and Serve's own part are not in it. Times are CPU time of the thread, so that other work on
the machine counts little.

    python benchmarks/router_decision.py
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from serve_app.config import RouterSettings
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.block_hashes import BlockHasher
from serve_app.router.lifecycle import Closed, LifecycleBatch
from serve_app.router.routing_state import RouteRequest, RoutingState

BLOCK_SIZE_TOKENS = 16
VOCABULARY = 150_000
NUM_DOCUMENTS = 8
HOLDERS = 3
OTHER_PAIRS = 300_000
"""(replica, block) pairs in the index that no prompt asks for."""
WARM_UP = 40
"""Decisions before the timing; more than the residual needs to be in use."""


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of one kind of prompt at one number of replicas."""

    prompts: str
    prompt_tokens: int
    num_replicas: int
    hash_p50_us: float
    decide_p50_us: float
    total_p50_us: float
    total_p99_us: float


def main(
    repeats: Annotated[int, typer.Option(min=10, help="Timed decisions a row; a fifth of it at 64,000 tokens.")] = 300,
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "1000,8000,64000",
    replicas: Annotated[str, typer.Option(help="Numbers of replicas.")] = "1,10,100",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write the rows.", dir_okay=False)] = None,
) -> None:
    """Print one row for each kind of prompt, its length and the number of replicas, times in microseconds."""
    rng = np.random.default_rng(seed)
    print(f"python benchmarks/router_decision.py --repeats {repeats} --seed {seed}\n")
    print("| prompts | tokens | replicas | hash p50 us | decide p50 us | both p50 us | both p99 us |")
    print("| --- |" + " ---: |" * 6)
    rows = []
    for kind in ("fresh", "shared"):
        for num_tokens in map(int, prompt_tokens.split(",")):
            for num_replicas in map(int, replicas.split(",")):
                count = repeats if num_tokens < 64_000 else max(10, repeats // 5)
                print(f"{kind} prompts of {num_tokens:,} tokens, {num_replicas} replicas ...", file=sys.stderr)
                rows.append(_measure(kind, num_tokens, num_replicas, count, rng))
                print(_line(rows[-1]), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _line(row: Row) -> str:
    times = (row.hash_p50_us, row.decide_p50_us, row.total_p50_us, row.total_p99_us)
    return (
        f"| {row.prompts} | {row.prompt_tokens:,} | {row.num_replicas} | "
        + " | ".join(f"{t:.0f}" for t in times)
        + " |"
    )


def _measure(kind: str, num_tokens: int, num_replicas: int, repeats: int, rng: np.random.Generator) -> Row:
    hasher, other = BlockHasher(BLOCK_SIZE_TOKENS), BlockHasher(BLOCK_SIZE_TOKENS, memo_runs=0)
    state = _state(num_replicas, rng)
    documents = [_token_ids(num_tokens // 2, rng) for _ in range(NUM_DOCUMENTS)]
    hash_us, decide_us = list[float](), list[float]()
    for number in range(WARM_UP + repeats):
        held = documents[number % NUM_DOCUMENTS] if kind == "shared" else _token_ids(num_tokens // 2, rng)
        for holder in range(min(HOLDERS, num_replicas)):
            if kind == "fresh" or number < NUM_DOCUMENTS:
                state.index.stored(f"replica-{(number + holder) % num_replicas}", other.hashes(held))
        prompt = held + _token_ids(num_tokens - len(held), rng)
        one_hash_us, one_decide_us = _decide(state, hasher, prompt, number, num_replicas)
        hash_us.append(one_hash_us)
        decide_us.append(one_decide_us)
    hashed, decided = np.array(hash_us[WARM_UP:]), np.array(decide_us[WARM_UP:])
    both = hashed + decided
    return Row(
        prompts=kind,
        prompt_tokens=num_tokens,
        num_replicas=num_replicas,
        hash_p50_us=float(np.median(hashed)),
        decide_p50_us=float(np.median(decided)),
        total_p50_us=float(np.median(both)),
        total_p99_us=float(np.percentile(both, 99)),
    )


def _decide(
    state: RoutingState, hasher: BlockHasher, prompt: list[int], number: int, num_replicas: int
) -> tuple[float, float]:
    """Microseconds of hashing and of deciding. Half of the requests stay open, the others teach the residual."""
    ids, now_s = [f"replica-{one}" for one in range(num_replicas)], float(number)
    begun = time.thread_time()
    hashes = hasher.hashes(prompt)
    hashed = time.thread_time()
    decision = state.decide(RouteRequest(str(number), len(prompt), hashes), ids, now_s)
    decided = time.thread_time()
    closed = Closed(str(number), 200, "finished", 1.0, 0.5, len(prompt), decision.hit_tokens, 4)
    if number % 2:
        state.on_batch(LifecycleBatch(decision.replica_id, "one", number, (closed,)), now_s)
    return (hashed - begun) * 1e6, (decided - hashed) * 1e6


def _state(num_replicas: int, rng: np.random.Generator) -> RoutingState:
    state = RoutingState(RouterSettings(), PrefillProfile.flat(), BLOCK_SIZE_TOKENS)
    state.set_replicas(f"replica-{number}" for number in range(num_replicas))
    for number in range(num_replicas):
        others = rng.bytes(8 * (OTHER_PAIRS // num_replicas))
        state.index.stored(f"replica-{number}", (others[at : at + 8] for at in range(0, len(others), 8)))
    return state


def _token_ids(num_tokens: int, rng: np.random.Generator) -> list[int]:
    ids: list[int] = rng.integers(0, VOCABULARY, num_tokens).tolist()
    return ids


if __name__ == "__main__":
    typer.run(main)
