"""vLLM's scheduler and block pool with our policies inside; the only file here that imports vLLM.

Chosen by vLLM's own arguments, in `vllm serve` as under Ray:

    scheduler_cls="serve_app.policies.vllm_hooks.FairwayScheduler"
    additional_config={"fairway": {...fields of serve_app.config.EnginePolicy...}}

Each hook reads numbers off requests or blocks, calls the pure policy and applies its answer; vLLM's own `schedule` and
allocation run unchanged. What is touched of vLLM is named in tests/policies/test_vllm_contract.py.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import zmq
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request, RequestStatus

from serve_app.config import EnginePolicy
from serve_app.policies.eviction import touch_order
from serve_app.policies.fairway import FairwayParams, FloatArray, IntArray
from serve_app.policies.orderings import ORDERINGS, ORDERINGS_BY_ARRIVAL_ALONE, order_within_classes
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.policies.prefix_search import longest_prefix
from serve_app.policies.rlt import RltFreeBlocks
from serve_app.policies.rlt_queue import RltFreeBlockQueue

# Below vLLM's own logger, so that the engine's process prints it in vLLM's format.
logger = logging.getLogger("vllm.fairway")

_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class FairwayScheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's scheduler with the waiting queue in our order and the KV blocks evicted by our policy.

    With vLLM's priority policy, priority stays the outer order and ours holds within a class. A preempted request keeps
    its arrival. Derived from AsyncScheduler, as vLLM would turn asynchronous scheduling off for any other base.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError on a bad `additional_config["fairway"]` and on a model that it doesn't fit."""
        policy = EnginePolicy.from_section(vllm_config.additional_config, "fairway")
        # vLLM's event publisher binds only what looks like a wildcard or IPv6, and connects anything else: an IPv4
        # address written as IPv6 ("[::ffff:10.0.0.7]") binds that address alone, once ZeroMQ may use IPv6.
        zmq.Context.instance().setsockopt(zmq.IPV6, 1)
        super().__init__(vllm_config, *args, **kwargs)
        self.engine_policy = policy
        self.waiting = OrderedWaitingQueue()
        self._fairway_params = FairwayParams(policy.fast_weight, policy.patience_multiple, policy.patience_floor_s)
        self._prefill_profile = _profile(policy)
        self._prefix_lookup = PrefixLookup(self.kv_cache_manager)
        self._rlt = None
        self._protects_waiting = policy.protect_waiting and self.cache_config.enable_prefix_caching
        if policy.eviction == "rlt" and self.cache_config.enable_prefix_caching:
            self._rlt = install_rlt(self.kv_cache_manager, Random(policy.seed))
        if self._protects_waiting:
            _need_full_attention(self.kv_cache_manager, "protect_waiting=True", "False")
        logger.info("fairway-serve: ordering=%s eviction=%s", policy.ordering, policy.eviction)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._rlt is not None:
            self._rlt.begin_step()
        self._prefix_lookup.begin_step()
        if self._may_admit():
            self._take_back_ready_requests()
            self._reorder_waiting()
        # A step that admits nobody may still allocate, and evict, for requests that run.
        if self._protects_waiting and self.pause_state != PauseState.PAUSED_ALL:
            self._protect_waiting()
        return super().schedule(throttle_prefills)

    def _now_s(self) -> float:
        """The clock of `Request.arrival_time`; a simulator overrides it."""
        return time.time()

    def _may_admit(self) -> bool:
        """Whether this step could start a waiting request at all; an order that nobody reads needs no work."""
        num_running = len(self.running) + self.num_waiting_for_streaming_input
        return bool(self.pause_state == PauseState.UNPAUSED and num_running < self.max_num_running_reqs)

    def _take_back_ready_requests(self) -> None:
        """Move requests that are no longer blocked from `skipped_waiting` to `waiting`.

        vLLM drains `skipped_waiting` first, so such a request would pass any order. Those that still wait for a
        grammar, for streamed input or for remote KV (which holds blocks already) stay with vLLM.
        """
        ready = [request for request in self.skipped_waiting if self._is_ready(request)]
        if ready:
            self.skipped_waiting.remove_requests(ready)
            self.waiting.extend(ready)

    def _is_ready(self, request: Request) -> bool:
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return bool(self._try_promote_blocked_waiting_request(request))
        return request.status in _READY

    def _reorder_waiting(self) -> None:
        requests = list(self.waiting)
        if len(requests) > 1:
            self.waiting.reorder([requests[index] for index in self._waiting_order(requests).tolist()])

    def _waiting_order(self, requests: list[Request]) -> IntArray:
        """`requests`: n waiting ones. Returns: (n,), a permutation of their indices, first served first."""
        ordering = self.engine_policy.ordering
        arrival_s = np.array([request.arrival_time for request in requests], dtype=np.float64)
        priority = np.zeros(len(requests), dtype=np.int64)
        if self.policy == SchedulingPolicy.PRIORITY:
            priority = np.array([request.priority for request in requests], dtype=np.int64)
        if ordering in ORDERINGS_BY_ARRIVAL_ALONE:
            unread = np.zeros(len(requests), dtype=np.int64)
            columns = (unread, unread, np.zeros(len(requests)), np.zeros(len(requests)))
        else:
            columns = self._work_and_patience(requests, arrival_s)
        return order_within_classes(ORDERINGS[ordering], self._fairway_params, priority, *columns, arrival_s)

    def _work_and_patience(
        self, requests: list[Request], arrival_s: FloatArray
    ) -> tuple[IntArray, IntArray, FloatArray, FloatArray]:
        """The other arrays of an ordering, (n,) each: hit_tokens, todo_tokens, waited_s, prefill_s."""
        hit_tokens = np.array(self._prefix_lookup.hit_tokens(requests), dtype=np.int64)
        all_tokens = np.array([request.num_tokens for request in requests], dtype=np.int64)
        prompt_tokens = np.array([request.num_prompt_tokens for request in requests], dtype=np.int64)
        # The front end stamps arrivals, maybe on another machine: its clock may be ahead.
        waited_s = np.maximum(self._now_s() - arrival_s, 0.0)
        return hit_tokens, all_tokens - hit_tokens, waited_s, self._prefill_profile.prefill_s(prompt_tokens)

    def _protect_waiting(self) -> None:
        """Let the free blocks that waiting requests would hit count as just used, before this step evicts any.

        RLT needs only the deepest block of a request, as it evicts no block before its descendants; LRU needs each. A
        request that waits with tokens computed (loaded from elsewhere) holds its blocks.
        """
        pool = self.kv_cache_manager.block_pool
        waiting = [request for request in (*self.waiting, *self.skipped_waiting) if not request.num_computed_tokens]
        chains = self._prefix_lookup.hit_blocks(waiting)
        if self._rlt is not None:
            deepest = [block for chain in chains for block in islice(chain, 1)]
            self._rlt.touch(block for block in dict.fromkeys(deepest) if pool.blocks[block].ref_cnt == 0)
            return
        free = [block for index in touch_order(chains) if (block := pool.blocks[index]).ref_cnt == 0]
        for block in free:
            pool.free_block_queue.remove(block)
        pool.free_block_queue.append_n(free)


class OrderedWaitingQueue(FCFSRequestQueue):  # type: ignore[misc]  # vLLM is untyped here
    """A waiting queue in whatever order it was given last, under any of vLLM's policies.

    `add_request` puts a request last and `prepend_request` (a preemption) first, but only until the next step: nothing
    is admitted before the order is computed anew, and there a preempted request stands where its arrival puts it.
    """

    def reorder(self, requests: Iterable[Request]) -> None:
        self.clear()
        self.extend(requests)


def _profile(policy: EnginePolicy) -> PrefillProfile:
    if policy.prefill_profile is not None:
        return PrefillProfile(policy.prefill_profile)
    profile = PrefillProfile.flat()
    logger.warning("fairway-serve: no prefill_profile is configured, %s", profile.table.derived)
    return profile


class PrefixLookup:
    """How many of a waiting request's tokens are cached, without a trace in vLLM's statistics or events.

    A full-attention model is asked block by block: cached blocks form prefixes, so a search from the last answer takes
    two look-ups when nothing changed. (Right after `evict_blocks` cut a hole, it may answer too much; that moves the
    request in the queue, no more.) Any other model is asked through vLLM's coordinator, in O(cached blocks).
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._coordinator = manager.coordinator
        self._searches = _is_full_attention(manager) and not self._coordinator.eagle_group_ids
        self._hit_tokens: dict[str, int] = {}
        self._last_hit_tokens: dict[str, int] = {}
        self._is_new_step = True

    def begin_step(self) -> None:
        """Blocks may have come and gone: what was found until now is where the next search starts."""
        self._is_new_step = True

    def hit_tokens(self, requests: list[Request]) -> list[int]:
        """(n,), for each request, looked up once a step; forgets the requests that a whole step doesn't ask for."""
        if self._is_new_step:
            self._last_hit_tokens, self._hit_tokens, self._is_new_step = self._hit_tokens, {}, False
        for request in requests:
            if request.request_id not in self._hit_tokens:
                self._hit_tokens[request.request_id] = self._look_up(request)
        return [self._hit_tokens[request.request_id] for request in requests]

    def hit_blocks(self, requests: list[Request]) -> Iterator[Iterator[int]]:
        """For each request, the ids of the cached blocks behind `hit_tokens`, deepest first; full attention only."""
        block_tokens = self._manager.block_pool.hash_block_size
        for request, hit_tokens in zip(requests, self.hit_tokens(requests), strict=True):
            yield self._chain(request, hit_tokens // block_tokens)

    def _chain(self, request: Request, num_blocks: int) -> Iterator[int]:
        get_one_block, hashes = self._manager.block_pool.cached_block_hash_to_block.get_one_block, request.block_hashes
        deepest_first = range(num_blocks - 1, -1, -1)
        blocks = (get_one_block(make_block_hash_with_group_id(hashes[index], 0)) for index in deepest_first)
        return (block.block_id for block in blocks if block is not None)

    def _look_up(self, request: Request) -> int:
        if request.num_computed_tokens:
            return int(request.num_computed_tokens)
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        # The last token is always computed, as its logits are needed.
        max_hit_tokens = request.num_tokens - 1
        if not self._searches:
            return int(self._coordinator.find_longest_cache_hit(request.block_hashes, max_hit_tokens)[1])

        pool, hashes = self._manager.block_pool, request.block_hashes
        get_one_block = pool.cached_block_hash_to_block.get_one_block

        def is_cached(index: int) -> bool:
            return get_one_block(make_block_hash_with_group_id(hashes[index], 0)) is not None

        block_tokens = pool.hash_block_size
        last_hit_blocks = self._last_hit_tokens.get(request.request_id, 0) // block_tokens
        return int(longest_prefix(is_cached, max_hit_tokens // block_tokens, last_hit_blocks) * block_tokens)


def _is_full_attention(manager: KVCacheManager) -> bool:
    """Whether the model has one KV cache group, which keeps every block of a request as long as the request."""
    managers = manager.coordinator.single_type_managers
    return isinstance(manager.coordinator, UnitaryKVCacheCoordinator) and type(managers[0]) is FullAttentionManager


def _need_full_attention(manager: KVCacheManager, setting: str, instead: str) -> None:
    if not _is_full_attention(manager):
        groups = [type(group.kv_cache_spec).__name__ for group in manager.kv_cache_config.kv_cache_groups]
        raise ValueError(f"{setting} needs one KV cache group, of full attention, not {groups}; set it to {instead}")


def install_rlt(manager: KVCacheManager, rng: Random) -> RltFreeBlocks:
    """Let the manager's block pool evict by RLT from now on; call it before the first request.

    The pool keeps its identity and changes its class: coordinator, managers and connectors hold references to it, and
    a replacement object would have to be planted in each of them. Raises ValueError on a model that isn't one group of
    full attention, where a block's chain is not what RLT takes it for.
    """
    _need_full_attention(manager, "eviction='rlt'", "'lru'")
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
