"""vLLM's block pool with our eviction."""

from collections.abc import Callable
from random import Random
from typing import Any, Literal

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from serve_app.policies.adaptive import AdaptiveFreeBlocks
from serve_app.policies.eviction import FreeBlocks, LruFreeBlocks
from serve_app.policies.forest import BlockForest
from serve_app.policies.free_block_queue import FreeBlockQueue
from serve_app.policies.rlt import RltFreeBlocks

EvictionName = Literal["rlt", "lru", "adaptive"]


def is_full_attention(manager: KVCacheManager) -> bool:
    """Whether the model has one KV cache group, which keeps every block of a request as long as the request."""
    managers = manager.coordinator.single_type_managers
    return isinstance(manager.coordinator, UnitaryKVCacheCoordinator) and type(managers[0]) is FullAttentionManager


def need_full_attention(manager: KVCacheManager, setting: str, instead: str) -> None:
    if not is_full_attention(manager):
        groups = [type(group.kv_cache_spec).__name__ for group in manager.kv_cache_config.kv_cache_groups]
        raise ValueError(f"{setting} needs one KV cache group, of full attention, not {groups}; set it to {instead}")


def install_eviction(manager: KVCacheManager, name: EvictionName, rng: Random) -> FreeBlocks:
    """Let the manager's block pool evict by the policy of that name from now on, idle or in the middle of its work.

    The pool keeps its identity and changes its class: coordinator, managers and connectors hold references to it, and
    a replacement object would have to be planted in each of them. What evicts by that policy already is returned as it
    is. A new policy takes over which blocks are cached, in which chains and when they were used, not the pins: they
    stay with the old one, for whoever set them to set again. Plain "lru" needs no call, as it is what vLLM does; our
    LRU can pin blocks.

    Raises:
        ValueError: the model isn't one group of full attention, where a block's chain is not what we take it for.
    """
    need_full_attention(manager, f"eviction={name!r}", "'lru' without protection")
    pool = manager.block_pool
    makes: dict[str, Callable[[], BlockForest]] = {
        "lru": lambda: LruFreeBlocks(pool.num_gpu_blocks, ()),
        "rlt": lambda: RltFreeBlocks(pool.num_gpu_blocks, (), rng),
        "adaptive": lambda: AdaptiveFreeBlocks(pool.num_gpu_blocks, (), rng),
    }
    policy = makes[name]()
    if not isinstance(pool, PolicyBlockPool):
        _take_over_from_vllm(policy, manager)
    elif type(pool.free_block_queue.free) is type(policy):
        return pool.free_block_queue.free
    else:
        policy.take_over(pool.free_block_queue.free)
    pool.free_block_queue = FreeBlockQueue(pool.blocks, policy)
    pool.__class__ = PolicyBlockPool
    return policy


def _take_over_from_vllm(policy: FreeBlocks, manager: KVCacheManager) -> None:
    """Tell `policy`, to which all blocks are used, what vLLM's own pool holds.

    vLLM does not know what a free block continues, so each counts as a chain of its own until it is evicted.
    """
    pool = manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    for blocks in manager.coordinator.single_type_managers[0].req_to_blocks.values():
        for parent, block in zip([None, *blocks], blocks, strict=False):
            if block.block_hash is not None and not policy.is_cached(block.block_id):
                policy.cache(block.block_id, None if parent is None else parent.block_id)
    for block_id in free:
        if pool.blocks[block_id].block_hash is not None:
            policy.cache(block_id, None)
    policy.release(free)


class PolicyBlockPool(BlockPool):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's block pool, telling the free list which block continues which, and which hold nothing any more."""

    free_block_queue: "FreeBlockQueue[KVCacheBlock, BlockForest]"

    def cache_full_blocks(
        self, request: Request, blocks: list[KVCacheBlock], num_cached_blocks: int, num_full_blocks: int, **kwargs: Any
    ) -> None:
        if num_cached_blocks >= num_full_blocks:
            return
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, **kwargs)
        parent = blocks[num_cached_blocks - 1].block_id if num_cached_blocks else None
        new = [block.block_id for block in blocks[num_cached_blocks:num_full_blocks] if block.block_hash is not None]
        self.free_block_queue.free.cache_chain(new, parent)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        self.free_block_queue.free.uncache(block.block_id)
        hashes: list[BlockHashWithGroupId] = super()._remove_cached_block_hashes(block)
        return hashes

    def reset_prefix_cache(self) -> bool:
        done = bool(super().reset_prefix_cache())
        if done:
            for block in self.blocks:
                self.free_block_queue.free.uncache(block.block_id)
        return done
