"""What does an evicted block cost under RLT, beside vLLM's own free queue?

Times one block's way round a full cache: taken from the free queue (which evicts what it holds), given new content as
part of a chain, and released. vLLM's block pool does the same work around both queues (hashes, events), which is not in
it. Times are CPU time of the thread, so that other work on the machine counts little.

    python benchmarks/eviction_cost.py
"""

import random
import statistics
import time
from collections.abc import Callable

import typer
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from serve_app.policies.rlt import RltFreeBlocks
from serve_app.policies.rlt_queue import RltFreeBlockQueue

CHAIN_BLOCKS = 64
"""Blocks of a request: 1,024 tokens in blocks of 16."""
NUM_BLOCKS = (1_000, 10_000, 100_000)


def main(repeats: int = 2_000, seed: int = 0) -> None:
    """Print one row for each cache size, microseconds a block."""
    print(f"python benchmarks/eviction_cost.py --repeats {repeats} --seed {seed}\n")
    print("| KV blocks | LRU us a block | RLT us a block | ratio |")
    print("| ---: | ---: | ---: | ---: |")
    for num_blocks in NUM_BLOCKS:
        lru_us = _us_a_block(_lru_round(num_blocks), num_blocks, repeats)
        rlt_us = _us_a_block(_rlt_round(num_blocks, seed), num_blocks, repeats)
        print(f"| {num_blocks:,} | {lru_us:.2f} | {rlt_us:.2f} | {rlt_us / lru_us:.1f} |", flush=True)


def _lru_round(num_blocks: int) -> Callable[[], None]:
    queue = FreeKVCacheBlockQueue([KVCacheBlock(block_id) for block_id in range(num_blocks)])

    def one_request() -> None:
        queue.append_n(queue.popleft_n(CHAIN_BLOCKS)[::-1])

    return one_request


def _rlt_round(num_blocks: int, seed: int) -> Callable[[], None]:
    rlt = RltFreeBlocks(num_blocks, range(num_blocks), random.Random(seed))
    queue = RltFreeBlockQueue([KVCacheBlock(block_id) for block_id in range(num_blocks)], rlt)

    def one_request() -> None:
        rlt.begin_step()
        taken = queue.popleft_n(CHAIN_BLOCKS)
        for index, block in enumerate(taken):
            rlt.cache(block.block_id, taken[index - 1].block_id if index else None)
        queue.append_n(taken[::-1])

    return one_request


def _us_a_block(one_request: Callable[[], None], num_blocks: int, repeats: int) -> float:
    """Median over requests, once every block has been cached."""
    for _ in range(2 * num_blocks // CHAIN_BLOCKS + 1):
        one_request()
    times_us = []
    for _ in range(repeats):
        begun = time.thread_time()
        one_request()
        times_us.append((time.thread_time() - begun) * 1e6)
    return statistics.median(times_us) / CHAIN_BLOCKS


if __name__ == "__main__":
    typer.run(main)
