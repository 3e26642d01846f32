"""What does the prefix index cost in memory, how many KV events does a router take, and does a look-up wait for them?

Memory: an index of so many (replica, block) pairs, every event with keys of its own as the decoder makes them. Events:
publishers of vLLM's own class in a process of their own send as fast as they can while the subscriber applies and, in
the same event loop, a prompt is looked up every 2 ms: how long each look-up waited for its turn and took, and how many
blocks were applied for a second of the loop's CPU time. Each batch stores one run of blocks and removes an older one,
one removal an event, as an engine does whose cache is full. The wait is wall time: other work on the machine counts.

    python benchmarks/router_index.py
"""

import asyncio
import gc
import json
import multiprocessing
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import typer

from serve_app.router.kv_events import KvEventSubscriber
from serve_app.router.prefix_index import PrefixIndex

RUN_BLOCKS = 512
"""Blocks of one batch: a prompt of 8,192 tokens at 16 a block."""
KEPT_BATCHES = 50
"""Batches after which a run is removed again."""
LOOK_UP_EVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of an index, by three measures."""

    pairs: int
    num_replicas: int
    traced_bytes: int
    rss_bytes: int
    estimated_bytes: int


@dataclass(frozen=True, slots=True)
class Flood:
    """What a subscriber did under a flood, and what look-ups in its loop felt."""

    num_replicas: int
    batches: int
    blocks: int
    """Stored and removed."""
    wall_s: float
    cpu_s: float
    blocks_per_cpu_s: float
    num_look_ups: int
    wait_p50_ms: float
    wait_p99_ms: float
    wait_max_ms: float
    look_up_p50_ms: float
    """Of 512 blocks."""
    turn_p99_cpu_ms: float
    """CPU time of one turn of the loop; a look-up that is due waits for two at most."""
    turn_max_cpu_ms: float


def main(
    pairs: Annotated[int, typer.Option(min=1_000, help="Pairs of the index whose memory is measured.")] = 1_000_000,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas that hold blocks and publish.")] = 10,
    batches: Annotated[int, typer.Option(min=100, help="Batches that each replica publishes.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the keys.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.", dir_okay=False)
    ] = None,
) -> None:
    """Print two tables: memory of the index, and the subscriber under a flood."""
    print(
        f"python benchmarks/router_index.py --pairs {pairs} --replicas {replicas} --batches {batches} --seed {seed}\n"
    )
    print("measuring memory ...", file=sys.stderr)
    memory = _memory(pairs, replicas, seed)
    print("| pairs | replicas | traced bytes a pair | resident bytes a pair | estimated bytes a pair |")
    print("|" + " ---: |" * 5)
    sizes = (memory.traced_bytes, memory.rss_bytes, memory.estimated_bytes)
    print(f"| {memory.pairs:,} | {replicas} | " + " | ".join(f"{size / memory.pairs:.0f}" for size in sizes) + " |\n")
    flood = asyncio.run(_flood(replicas, batches, seed))
    print(
        "| replicas | batches | blocks | blocks a CPU second | look-ups | wait p50 ms | p99 ms | max ms | look-up ms |"
    )
    print("|" + " ---: |" * 11)
    waits = (flood.wait_p50_ms, flood.wait_p99_ms, flood.wait_max_ms)
    times = (*waits, flood.look_up_p50_ms, flood.turn_p99_cpu_ms, flood.turn_max_cpu_ms)
    print(
        f"| {replicas} | {flood.batches:,} | {flood.blocks:,} | {flood.blocks_per_cpu_s:,.0f} | {flood.num_look_ups} | "
        + " | ".join(f"{one:.2f}" for one in times)
        + " |"
    )
    if json_path is not None:
        json_path.write_text(json.dumps({"memory": asdict(memory), "flood": asdict(flood)}, indent=2) + "\n")


def _memory(pairs: int, replicas: int, seed: int) -> Memory:
    gc.collect()
    before = _rss_bytes()
    index = _filled(pairs, replicas, seed)
    rss_bytes = _rss_bytes() - before
    estimated_bytes, num_entries = index.bytes_estimated(), index.num_entries
    del index
    gc.collect()
    tracemalloc.start()
    kept = _filled(pairs, replicas, seed)
    traced_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept.num_entries == num_entries
    return Memory(num_entries, replicas, traced_bytes, rss_bytes, estimated_bytes)


def _filled(pairs: int, replicas: int, seed: int) -> PrefixIndex:
    """A fifth of the runs are on several replicas, each with keys of its own."""
    rng, index = Random(seed), PrefixIndex(2 * pairs)
    popular = [rng.randbytes(8 * RUN_BLOCKS) for _ in range(1 + pairs // RUN_BLOCKS // 20)]
    number = 0
    while index.num_entries < pairs:
        run = rng.choice(popular) if rng.random() < 0.2 else rng.randbytes(8 * RUN_BLOCKS)
        index.stored(f"replica-{number % replicas}", [run[at : at + 8] for at in range(0, len(run), 8)])
        number += 1
    return index


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _flood(replicas: int, batches: int, seed: int) -> Flood:
    index = PrefixIndex(10_000_000)
    subscriber = KvEventSubscriber(index)
    here, there = multiprocessing.get_context("spawn").Pipe()
    engines = multiprocessing.get_context("spawn").Process(target=_publish, args=(there, replicas, batches, seed))
    engines.start()
    try:
        for replica_id, endpoint, replay_endpoint in await asyncio.to_thread(here.recv):
            await subscriber.follow(replica_id, replica_id, endpoint, replay_endpoint)
        await _until(lambda: all(subscriber.is_trusted(f"replica-{number}") for number in range(replicas)))
        here.send("go")
        return await _watched(index, subscriber, replicas, batches)
    finally:
        await subscriber.close()
        here.send("stop")
        engines.join()


async def _watched(index: PrefixIndex, subscriber: KvEventSubscriber, replicas: int, batches: int) -> Flood:
    prompt = [Random(0).randbytes(8) for _ in range(RUN_BLOCKS)]
    index.stored("holder", prompt)
    waits_ms, look_ups_ms, turns_ms = list[float](), list[float](), list[float]()
    begun, begun_cpu, shown = time.perf_counter(), time.thread_time(), 0
    watch = asyncio.create_task(_time_turns(turns_ms))
    while subscriber.counters.batches < replicas * batches:
        due = time.perf_counter() + LOOK_UP_EVERY_S
        await asyncio.sleep(LOOK_UP_EVERY_S)
        started = time.perf_counter()
        assert index.hit_blocks(prompt)["holder"] == RUN_BLOCKS
        waits_ms.append((started - due) * 1e3)
        look_ups_ms.append((time.perf_counter() - started) * 1e3)
        if subscriber.counters.batches - shown >= 200:
            shown = subscriber.counters.batches
            print(f"{shown:,} of {replicas * batches:,} batches applied ...", file=sys.stderr)
    wall_s, cpu_s = time.perf_counter() - begun, time.thread_time() - begun_cpu
    watch.cancel()
    blocks = replicas * RUN_BLOCKS * (2 * batches - KEPT_BATCHES)
    wait_p50_ms, wait_p99_ms, wait_max_ms = (float(np.percentile(waits_ms, at)) for at in (50, 99, 100))
    turn_p99_ms, turn_max_ms = (float(np.percentile(turns_ms, at)) for at in (99, 100))
    return Flood(
        num_replicas=replicas,
        batches=replicas * batches,
        blocks=blocks,
        wall_s=wall_s,
        cpu_s=cpu_s,
        blocks_per_cpu_s=blocks / cpu_s,
        num_look_ups=len(waits_ms),
        wait_p50_ms=wait_p50_ms,
        wait_p99_ms=wait_p99_ms,
        wait_max_ms=wait_max_ms,
        look_up_p50_ms=float(np.median(look_ups_ms)),
        turn_p99_cpu_ms=turn_p99_ms,
        turn_max_cpu_ms=turn_max_ms,
    )


async def _time_turns(turns_ms: list[float]) -> None:
    """CPU time of every turn of the loop, which never sleeps meanwhile."""
    last = time.thread_time()
    while True:
        await asyncio.sleep(0)
        now = time.thread_time()
        turns_ms.append((now - last) * 1e3)
        last = now


def _publish(pipe: Connection, replicas: int, batches: int, seed: int) -> None:
    import zmq
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

    rng, free_port = Random(seed), "tcp://127.0.0.1:*"
    publishers = [ZmqEventPublisher(0, free_port, free_port, topic=f"replica-{n}") for n in range(replicas)]
    sockets = [(one._pub, one._replay) for one in publishers]
    pipe.send(
        [(f"replica-{n}", *(s.getsockopt_string(zmq.LAST_ENDPOINT) for s in sockets[n])) for n in range(replicas)]
    )
    pipe.recv()
    for number in range(batches):
        for replica, publisher in enumerate(publishers):
            runs = [Random(f"{seed} {replica} {n}") for n in (number, number - KEPT_BATCHES)]
            stored, old = ([run.getrandbits(64) for _ in range(RUN_BLOCKS)] for run in runs)
            tokens = [rng.randrange(150_000) for _ in range(16)] * RUN_BLOCKS
            events: list[BlockStored | BlockRemoved] = [
                BlockStored(stored, None, tokens, 16, None, "GPU", None, [None] * RUN_BLOCKS, 0)
            ]
            if number >= KEPT_BATCHES:
                events += [BlockRemoved([one], "GPU", 0) for one in old]
            publisher.publish(KVEventBatch(ts=time.time(), events=events))
    pipe.recv()
    for publisher in publishers:
        publisher.shutdown()


async def _until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.perf_counter() + timeout_s
    while not holds():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"the publishers were not heard within {timeout_s:.0f} s")
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    typer.run(main)
