"""vLLM's block pool with our eviction."""

from random import Random
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from serve_app.policies.rlt import RltFreeBlocks
from serve_app.policies.rlt_queue import RltFreeBlockQueue


def is_full_attention(manager: KVCacheManager) -> bool:
    """Whether the model has one KV cache group, which keeps every block of a request as long as the request."""
    managers = manager.coordinator.single_type_managers
    return isinstance(manager.coordinator, UnitaryKVCacheCoordinator) and type(managers[0]) is FullAttentionManager


def need_full_attention(manager: KVCacheManager, setting: str, instead: str) -> None:
    if not is_full_attention(manager):
        groups = [type(group.kv_cache_spec).__name__ for group in manager.kv_cache_config.kv_cache_groups]
        raise ValueError(f"{setting} needs one KV cache group, of full attention, not {groups}; set it to {instead}")


def install_rlt(manager: KVCacheManager, rng: Random) -> RltFreeBlocks:
    """Let the manager's block pool evict by RLT from now on; call it before the first request.

    The pool keeps its identity and changes its class: coordinator, managers and connectors hold references to it, and
    a replacement object would have to be planted in each of them. Raises ValueError on a model that isn't one group of
    full attention, where a block's chain is not what RLT takes it for.
    """
    need_full_attention(manager, "eviction='rlt'", "'lru'")
    pool = manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    rlt = RltFreeBlocks(pool.num_gpu_blocks, free, rng)
    pool.free_block_queue = RltFreeBlockQueue(pool.blocks, rlt)
    pool.__class__ = RltBlockPool
    return rlt


class RltBlockPool(BlockPool):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's block pool, telling RLT which block continues which, and which hold nothing any more."""

    free_block_queue: "RltFreeBlockQueue[KVCacheBlock]"

    def cache_full_blocks(
        self, request: Request, blocks: list[KVCacheBlock], num_cached_blocks: int, num_full_blocks: int, **kwargs: Any
    ) -> None:
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, **kwargs)
        rlt = self.free_block_queue.rlt
        for index in range(num_cached_blocks, num_full_blocks):
            if blocks[index].block_hash is not None:
                rlt.cache(blocks[index].block_id, blocks[index - 1].block_id if index else None)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        self.free_block_queue.rlt.uncache(block.block_id)
        hashes: list[BlockHashWithGroupId] = super()._remove_cached_block_hashes(block)
        return hashes

    def reset_prefix_cache(self) -> bool:
        done = bool(super().reset_prefix_cache())
        if done:
            for block in self.blocks:
                self.free_block_queue.rlt.uncache(block.block_id)
        return done
