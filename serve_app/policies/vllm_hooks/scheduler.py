"""vLLM's scheduler with our policies inside."""

import logging
import time
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import zmq
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from serve_app.config import EnginePolicy
from serve_app.policies.eviction import touch_order
from serve_app.policies.fairway import FairwayParams, FloatArray, IntArray
from serve_app.policies.orderings import ORDERINGS, ORDERINGS_BY_ARRIVAL_ALONE, order_within_classes
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.policies.vllm_hooks.block_pool import install_rlt, need_full_attention
from serve_app.policies.vllm_hooks.prefix_lookup import PrefixLookup
from serve_app.policies.vllm_hooks.waiting_queue import OrderedWaitingQueue

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
            need_full_attention(self.kv_cache_manager, "protect_waiting=True", "False")
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


def _profile(policy: EnginePolicy) -> PrefillProfile:
    if policy.prefill_profile is not None:
        return PrefillProfile(policy.prefill_profile)
    profile = PrefillProfile.flat()
    logger.warning("fairway-serve: no prefill_profile is configured, %s", profile.table.derived)
    return profile
