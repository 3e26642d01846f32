"""What does an evicted block cost under our free lists, beside vLLM's own free queue?

Times the whole life of a block in vLLM's real block pool, with KV events: taken (which evicts what it holds), given new
content as part of a chain, and released; and the same for the free list alone, without the pool around it. A request is
a chain of 64 blocks. Times are CPU time of the thread, so that other work on the machine counts little; medians over
requests, once every block has been cached. "adaptive" follows its own shadows, whose cost is its `observe`.

State is what the free list itself keeps, all its objects by `sys.getsizeof`; vLLM's queue keeps two references in each
of its blocks.

    python benchmarks/eviction_cost.py
"""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import typer
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.request import Request

from serve_app.policies.adaptive import AdaptiveFreeBlocks
from serve_app.policies.eviction import LruFreeBlocks
from serve_app.policies.forest import BlockForest
from serve_app.policies.free_block_queue import FreeBlockQueue
from serve_app.policies.rlt import RltFreeBlocks
from serve_app.policies.vllm_hooks.block_pool import PolicyBlockPool

CHAIN_BLOCKS, BLOCK_TOKENS = 64, 16
NUM_BLOCKS = (1_000, 10_000, 100_000)
NAMES = ("vllm", "lru", "rlt", "adaptive")
POINTER_BYTES = 8


def main(repeats: int = 2_000, seed: int = 0) -> None:
    """Print one row for each cache size and free list; "over" is over vLLM's own queue."""
    print(f"python benchmarks/eviction_cost.py --repeats {repeats} --seed {seed}\n")
    print("| KV blocks | free list | whole life, us a block | over | list alone, us | observe, us | state, bytes |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for num_blocks in NUM_BLOCKS:
        base_us = 0.0
        for name in NAMES:
            policy = None if name == "vllm" else make_policy(name, num_blocks, seed)
            life_us = us_a_block(whole_life(num_blocks, policy), num_blocks, repeats)
            base_us = base_us or life_us
            bare = None if name == "vllm" else make_policy(name, num_blocks, seed)
            alone_us = us_a_block(list_alone(num_blocks, bare), num_blocks, repeats)
            observe_us = us_a_block(observing(policy), num_blocks, repeats) if name == "adaptive" and policy else 0.0
            state_bytes = (2 * POINTER_BYTES * num_blocks if policy is None else size_bytes(policy)) / num_blocks
            figures = f"{life_us:.2f} | {life_us / base_us:.2f} | {alone_us:.2f} | {observe_us:.2f} | {state_bytes:.0f}"
            print(f"| {num_blocks:,} | {name} | {figures} |", flush=True)


def make_policy(name: str, num_blocks: int, seed: int) -> BlockForest:
    rng = random.Random(seed)
    if name == "lru":
        return LruFreeBlocks(num_blocks, range(num_blocks))
    return (RltFreeBlocks if name == "rlt" else AdaptiveFreeBlocks)(num_blocks, range(num_blocks), rng)


def whole_life(num_blocks: int, policy: BlockForest | None) -> Callable[[list[bytes]], Callable[[], None]]:
    pool: Any = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS, enable_kv_cache_events=True)
    if policy is not None:
        policy.take(1)  # vLLM's null block
        pool.free_block_queue = FreeBlockQueue(pool.blocks, policy)
        pool.__class__ = PolicyBlockPool
    tokens = list(range(CHAIN_BLOCKS * BLOCK_TOKENS))
    request: Any = Request("r", tokens, SamplingParams(max_tokens=1), None, arrival_time=0.0)

    def with_hashes(hashes: list[bytes]) -> Callable[[], None]:
        request.block_hashes = hashes

        def one_request() -> None:
            if policy is not None:
                policy.begin_step()
            blocks = pool.get_new_blocks(CHAIN_BLOCKS)
            pool.cache_full_blocks(request, blocks, 0, CHAIN_BLOCKS, block_size=BLOCK_TOKENS, kv_cache_group_id=0)
            pool.free_blocks(reversed(blocks))
            pool.take_events()

        return one_request

    return with_hashes


def list_alone(num_blocks: int, policy: BlockForest | None) -> Callable[[list[bytes]], Callable[[], None]]:
    blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
    if policy is None:
        theirs = FreeKVCacheBlockQueue(blocks)
        return lambda hashes: lambda: theirs.append_n(theirs.popleft_n(CHAIN_BLOCKS)[::-1])
    ours, free = FreeBlockQueue(blocks, policy), policy

    def one_request() -> None:
        free.begin_step()
        taken = ours.popleft_n(CHAIN_BLOCKS)
        free.cache_chain([block.block_id for block in taken], None)
        ours.append_n(taken[::-1])

    return lambda hashes: one_request


def observing(policy: BlockForest) -> Callable[[list[bytes]], Callable[[], None]]:
    return lambda hashes: lambda: policy.observe(hashes)


def us_a_block(one: Callable[[list[bytes]], Callable[[], None]], num_blocks: int, repeats: int) -> float:
    """Median over requests, each of a chain that was never seen; only its own work is timed."""
    warm = 3 * num_blocks // CHAIN_BLOCKS + 1
    times_us = []
    for number in range(warm + repeats):
        first = number * CHAIN_BLOCKS
        request = one([(first + index).to_bytes(32) for index in range(CHAIN_BLOCKS)])
        begun = time.thread_time()
        request()
        if number >= warm:
            times_us.append((time.thread_time() - begun) * 1e6)
    return statistics.median(times_us) / CHAIN_BLOCKS


def size_bytes(root: object) -> int:
    """Of an object and all that only it leads to: no classes, functions or modules, and no small shared numbers."""
    seen: set[int] = set()
    found, total = [root], 0
    while found:
        one = found.pop()
        shared = isinstance(one, type | FunctionType | ModuleType | bool) or one is None
        if id(one) in seen or shared or (isinstance(one, int) and -5 <= one <= 256):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        found += gc.get_referents(one)
    return total


if __name__ == "__main__":
    typer.run(main)
