"""The prefix index against a slow reference, and against a real block pool that evicts and keeps duplicates."""

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from serve_app.router.block_hashes import block_key
from serve_app.router.prefix_index import PrefixIndex

BLOCK = 4


def keys(*names: int) -> list[bytes]:
    return [name.to_bytes(8, "big") for name in names]


def leading(hashes: Sequence[bytes], held: Counter[bytes]) -> int:
    return next((i for i, key in enumerate(hashes) if not held[key]), len(hashes))


def test_hits_are_leading_blocks_for_each_replica() -> None:
    index = PrefixIndex(100)
    index.stored("a", keys(1, 2, 3))
    index.stored("b", keys(1))
    index.stored("c", keys(2, 3))
    assert index.hit_blocks(keys(1, 2, 3, 4)) == {"a": 3, "b": 1}
    assert index.hit_blocks(keys(1, 2)) == {"a": 2, "b": 1}
    assert index.hit_blocks(keys(9)) == {}
    assert index.hit_blocks([]) == {}


def test_duplicate_block_stays_until_its_last_copy_is_removed() -> None:
    index = PrefixIndex(100)
    index.stored("a", keys(1))
    index.stored("a", keys(1))
    index.removed("a", keys(1))
    assert index.hit_blocks(keys(1)) == {"a": 1}
    index.removed("a", keys(1))
    assert index.hit_blocks(keys(1)) == {}
    index.removed("a", keys(1))
    index.removed("never seen", keys(1))
    assert index.num_entries == 0
    index.check_integrity()


def test_cleared_replica_holds_nothing_and_others_keep_theirs() -> None:
    index = PrefixIndex(100)
    index.stored("a", keys(1, 2))
    index.stored("b", keys(1))
    index.clear("a")
    assert index.hit_blocks(keys(1, 2)) == {"b": 1}
    assert (index.num_blocks("a"), index.num_blocks("b"), index.num_blocks("c")) == (0, 1, 0)
    index.stored("a", keys(1))
    assert index.hit_blocks(keys(1, 2)) == {"a": 1, "b": 1}
    index.check_integrity()


def test_newcomer_inherits_nothing_of_a_dropped_replica() -> None:
    index = PrefixIndex(100)
    index.stored("a", keys(1, 2))
    index.stored("b", keys(1))
    index.drop("a")
    index.drop("never seen")
    index.stored("c", keys(7))
    assert index.hit_blocks(keys(1, 2)) == {"b": 1}
    index.check_integrity()


def test_oldest_entries_of_the_largest_replica_are_forgotten_over_the_cap() -> None:
    index = PrefixIndex(10)
    index.stored("small", keys(100, 101, 102))
    index.stored("large", keys(*range(8)))
    assert index.num_entries == 10
    assert index.num_forgotten == 1
    assert index.num_blocks("small") == 3
    assert index.hit_blocks(keys(0)) == {}
    assert index.hit_blocks(keys(1)) == {"large": 1}
    index.stored("large", keys(*range(20, 60)))
    assert index.num_entries <= 10
    index.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_agree_with_counters(seed: int) -> None:
    rng = random.Random(seed)
    index, reference = PrefixIndex(10_000), {name: Counter[bytes]() for name in "abcd"}
    for _ in range(3_000):
        name, some = rng.choice("abcd"), keys(*rng.choices(range(40), k=rng.randrange(1, 6)))
        match rng.choices(["stored", "removed", "clear", "drop", "hit"], [40, 40, 1, 1, 20])[0]:
            case "stored":
                index.stored(name, some)
                reference[name].update(some)
            case "removed":
                index.removed(name, some)
                for key in some:
                    reference[name][key] = max(0, reference[name][key] - 1)
            case "clear":
                index.clear(name)
                reference[name].clear()
            case "drop":
                index.drop(name)
                reference[name].clear()
            case "hit":
                expected = {name: n for name, held in reference.items() if (n := leading(some, held))}
                assert index.hit_blocks(some) == expected
    index.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_index_follows_a_real_block_pool_with_duplicates_and_evictions(seed: int) -> None:
    rng = random.Random(seed)
    init_none_hash(sha256)
    pool = BlockPool(num_gpu_blocks=40, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    index, running = PrefixIndex(10_000), list[list[KVCacheBlock]]()
    prompts = [_request(f"{i}", [i % 3] * 8 + [i] * rng.randrange(1, 20)) for i in range(12)]
    num_duplicated = 0
    for _ in range(400):
        request = rng.choice(prompts)
        num_blocks = len(request.block_hashes)
        if running and (rng.random() < 0.5 or pool.get_num_free_blocks() < num_blocks):
            pool.free_blocks(reversed(running.pop(rng.randrange(len(running)))))
        if pool.get_num_free_blocks() >= num_blocks:  # computed from scratch, so a block in the cache gets a twin
            blocks = pool.get_new_blocks(num_blocks)
            pool.cache_full_blocks(request, blocks, 0, num_blocks, BLOCK, 0)
            running.append(blocks)
        for event in pool.take_events():
            follow = {BlockStored: index.stored, BlockRemoved: index.removed}[type(event)]
            follow("a", [block_key(one) for one in event.block_hashes])
        num_duplicated += any(isinstance(held, dict) for held in pool.cached_block_hash_to_block._cache.values())
        for one in prompts:
            hits = [pool.get_cached_block(block_hash, [0]) is not None for block_hash in one.block_hashes]
            expected = [*hits, False].index(False)
            assert index.hit_blocks([block_key(h) for h in one.block_hashes]).get("a", 0) == expected
    index.check_integrity()
    assert num_duplicated > 100


@pytest.mark.parametrize(
    ("num_replicas", "blocks_an_event", "shared", "expects"),
    [(1, 256, False, False), (10, 1, True, False), (10, 256, True, True), (100, 16, True, False), (4, 64, False, True)],
)
def test_estimated_memory_is_right_within_a_quarter(
    num_replicas: int, blocks_an_event: int, shared: bool, expects: bool
) -> None:
    rng = random.Random(0)
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(1_000_000)
    for number in range(60_000 // blocks_an_event):
        name = f"replica-{number % num_replicas}"
        start = rng.randrange(20_000) if shared else number * blocks_an_event
        index.stored(name, keys(*range(start, start + blocks_an_event)))
        if expects and number % 4 == 0:
            index.expect(name, str(number), keys(*range(start + 10**6, start + 10**6 + blocks_an_event)), 0.0)
    gc.collect()
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.num_entries > 20_000
    assert index.bytes_estimated() == pytest.approx(used_bytes, rel=0.25)


def test_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_entries must be at least 1, got 0"):
        PrefixIndex(0)


def _request(request_id: str, token_ids: list[int]) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
