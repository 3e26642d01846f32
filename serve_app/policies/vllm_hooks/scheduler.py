"""vLLM's scheduler with our policies inside."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
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
from serve_app.policies.carried import BoolArray
from serve_app.policies.eviction import FreeBlocks
from serve_app.policies.fairway import IntArray
from serve_app.policies.head_of_line import fitting_first
from serve_app.policies.prefill_share import running_prefill_cap
from serve_app.policies.queue_order import QueueOrder
from serve_app.policies.vllm_hooks import live
from serve_app.policies.vllm_hooks.block_pool import install_eviction, is_full_attention, need_full_attention
from serve_app.policies.vllm_hooks.step_clock import StepClock
from serve_app.policies.vllm_hooks.waiting_queue import OrderedWaitingQueue
from serve_app.policies.vllm_hooks.waiting_requests import WaitingRequests

# Below vLLM's own logger, so that the engine's process prints it in vLLM's format.
logger = logging.getLogger("vllm.fairway")

_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
EXACT_FITS = 16
"""Requests of which it is counted how many of their hit blocks are free, when blocks are short; each costs O(hit)."""


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
        self.waiting = OrderedWaitingQueue()
        self.num_left_to_vllm = 0
        """Requests that were seen waiting for something else than their turn: vLLM's own order is theirs."""
        self._left_to_vllm: set[str] = set()
        self._seen_alone: Request | None = None
        self._full_attention = is_full_attention(self.kv_cache_manager)
        self._step_clock = StepClock(policy)
        self._prefill_profile = self._step_clock.profile
        self._eviction: FreeBlocks | None = None
        self._requests = WaitingRequests(self.kv_cache_manager, self.policy == SchedulingPolicy.PRIORITY)
        self._order = QueueOrder(policy, self.max_num_scheduled_tokens)
        self._follow_policy(policy)
        live.attach()

    @property
    def engine_policy(self) -> EnginePolicy:
        """The policy in force."""
        return self._order.policy

    def change_policy(self, changes: Mapping[str, object]) -> EnginePolicy:
        """Set some of `config.LIVE_FIELDS` otherwise, from the next step on. Returns: the policy then in force.

        Raises:
            ValueError: naming the field, its value and its bound; nothing is changed then.
        """
        self._follow_policy(self.engine_policy.changed(changes))
        return self.engine_policy

    def policy_stats(self) -> dict[str, Any]:
        """The policy in force and what it has to do with at the moment."""
        self._sync()
        table = self._requests.table
        waiting = table.waiting_rows()
        return {
            "policy": self.engine_policy.model_dump(mode="json", exclude={"prefill_profile"}),
            "num_waiting": len(waiting),
            "num_due": int(self._order.is_due(table, waiting).sum()),
            "waiting_todo_tokens": int((table.all_tokens[waiting] - table.hit_tokens[waiting]).sum()),
            "num_left_to_vllm": self.num_left_to_vllm,
        }

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._eviction is not None:
            self._eviction.begin_step()
        if self._step_clock.is_learning:
            self._step_clock.begins(self._now_s(), is_idle=not self.requests)
        if self.waiting or self.skipped_waiting or self._requests.table.row_of:
            output = self._schedule_in_order(throttle_prefills)
        else:
            output = super().schedule(throttle_prefills)
        if self._step_clock.is_learning:
            self._step_clock.scheduled(output)
        if self._eviction is not None:
            for new in output.scheduled_new_reqs:
                self._eviction.observe(self.requests[new.req_id].block_hashes)
        return output

    def _schedule_in_order(self, throttle_prefills: bool) -> SchedulerOutput:
        may_admit = self._may_admit()
        # Also while nobody may start: a request without a row loses its account.
        if self.skipped_waiting:
            self._take_back_ready_requests()
        is_ordered = self._needs_order()
        if is_ordered:
            self._sync()
        cap_tokens = None
        # Nobody reads the order of a queue that nobody may leave.
        if is_ordered and may_admit and self.waiting:
            front_fits = self._reorder_waiting()
            cap_tokens = self._running_prefill_cap() if front_fits else None
        with self._capped(cap_tokens):
            output = super().schedule(throttle_prefills)
        self._account_for(output)
        return output

    def _now_s(self) -> float:
        """The clock of `Request.arrival_time`; a simulator overrides it."""
        return time.time()

    def _follow_policy(self, policy: EnginePolicy) -> None:
        """Take the policy over; raises ValueError on a model that it doesn't fit, with nothing changed."""
        has_cache = bool(self.cache_config.enable_prefix_caching)
        protects = policy.protect_waiting
        if protects is None:
            protects = policy.is_carried and self._full_attention
        if policy.protect_waiting and has_cache:
            need_full_attention(self.kv_cache_manager, "protect_waiting=True", "False")
        if has_cache and (policy.eviction != "lru" or protects or self._eviction is not None):
            self._eviction = install_eviction(self.kv_cache_manager, policy.eviction, Random(policy.seed))
        self._requests.prefixes.evicted_by(self._eviction)
        self._requests.protect_in(self._eviction if protects else None)
        self._order.follow(policy)
        logger.info("fairway-serve: ordering=%s eviction=%s", policy.ordering, policy.eviction)

    def _may_admit(self) -> bool:
        """Whether this step could start a waiting request at all."""
        num_running = len(self.running) + self.num_waiting_for_streaming_input
        return bool(self.pause_state == PauseState.UNPAUSED and num_running < self.max_num_running_reqs)

    def _needs_order(self) -> bool:
        """Whether anything is to be known of the requests in this step.

        A short request that comes to an empty queue is left alone in its first step, in which it mostly starts.
        """
        if self._requests.table.row_of or len(self.waiting) > 1:
            return True
        if not self.waiting:
            return False
        [alone] = self.waiting
        is_new, self._seen_alone = alone is not self._seen_alone, alone
        return not is_new or bool(alone.num_tokens > self.max_num_scheduled_tokens)

    def _take_back_ready_requests(self) -> None:
        """Move requests that are no longer blocked from `skipped_waiting` to `waiting`.

        vLLM drains `skipped_waiting` first, so such a request would pass any order. Those that still wait for a
        grammar, for streamed input or for remote KV (which holds blocks already) stay with vLLM, and are counted.
        """
        ready = [request for request in self.skipped_waiting if self._is_ready(request)]
        if ready:
            self.skipped_waiting.remove_requests(ready)
            self.waiting.add_requests(ready)
        left = {request.request_id for request in self.skipped_waiting}
        self.num_left_to_vllm += len(left - self._left_to_vllm)
        self._left_to_vllm = left

    def _is_ready(self, request: Request) -> bool:
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return bool(self._try_promote_blocked_waiting_request(request))
        return request.status in _READY

    def _sync(self) -> None:
        """Take over who came and went and which blocks did, and open the accounts of those who came."""
        table = self._requests.table
        new = self._requests.sync(self.waiting)
        if new:
            running_tokens = sum(max(one.num_prompt_tokens - one.num_computed_tokens, 0) for one in self.running)
            prefill_s = self._prefill_profile.prefill_s(table.prompt_tokens[new])
            self._order.open_accounts(table, new, prefill_s, running_tokens, self._now_s())

    def _reorder_waiting(self) -> bool:
        """Put the waiting queue into order. Returns: whether its front fits into the free blocks."""
        table = self._requests.table
        rows = table.waiting_rows()
        if len(rows) == 1:
            return bool(self._fits(rows)[0])
        order = self._waiting_order(rows)
        fits = self._fits(rows[order])
        if self.engine_policy.is_carried and not fits.all():
            by_index = np.empty(len(rows), dtype=np.bool_)
            by_index[order] = fits
            # Nobody passes one of a higher priority.
            priority = table.priority[rows[order]]
            end = int(np.searchsorted(priority, priority[np.argmin(fits)], side="right"))
            first = fitting_first(order[:end], by_index, self._order.is_due(table, rows))
            order = np.concatenate([first, order[end:]])
            fits = by_index[order]
        requests = table.requests
        self.waiting.reorder([requests[row] for row in rows[order].tolist()])
        return bool(fits[0])

    def _waiting_order(self, rows: IntArray) -> IntArray:
        """`rows`: of n waiting requests. Returns: (n,), a permutation of their indices, first served first."""
        table = self._requests.table
        prefill_s = self._prefill_profile.prefill_s(table.prompt_tokens[rows])
        return self._order.order(table, rows, prefill_s, self._now_s())

    def _fits(self, rows: IntArray) -> BoolArray:
        """(n,), whether the request of each of these rows, in the order in which they go, fits into the free blocks."""
        manager = self.kv_cache_manager
        if not self._full_attention:
            return np.ones(len(rows), dtype=np.bool_)
        table, block_tokens = self._requests.table, self.block_size
        num_free = manager.block_pool.get_num_free_blocks() - (manager.watermark_blocks if self.running else 0)
        tokens = table.all_tokens[rows]
        if not self.scheduler_reserve_full_isl:
            tokens = np.minimum(tokens, table.hit_tokens[rows] + self.max_num_scheduled_tokens)
        # As if all blocks that it hits were free, and so counted among the free ones.
        needed = -(-tokens // block_tokens)
        fits: BoolArray = needed <= num_free
        for index in np.flatnonzero(~fits)[:EXACT_FITS].tolist():
            row = int(rows[index])
            in_use = int(table.hit_tokens[row]) // block_tokens - self._requests.prefixes.num_free_blocks_hit(row)
            fits[index] = needed[index] - in_use <= num_free
        return fits

    def _running_prefill_cap(self) -> int | None:
        """Most tokens that a running prefill may have computed in this step."""
        share = self.engine_policy.prefill_share()
        if share >= 1 or not self.scheduler_config.enable_chunked_prefill:
            return None
        table = self._requests.table
        prefilling = np.array(self._requests.prefilling_rows(), dtype=np.int64)
        if not len(prefilling) or self._order.is_due(table, prefilling).any():
            return None
        # None is held for one of a lower priority.
        highest = table.priority[prefilling].min()
        waiting = (table.row_of[request.request_id] for request in self.waiting)
        rows = takewhile(lambda row: table.priority[row] <= highest, waiting)
        return running_prefill_cap(
            share,
            self.max_num_scheduled_tokens,
            num_decodes=len(self.running) - len(prefilling),
            num_prefills=len(prefilling),
            waiting_tokens=(int(table.all_tokens[row] - table.hit_tokens[row]) for row in rows),
        )

    @contextmanager
    def _capped(self, cap_tokens: int | None) -> Iterator[None]:
        """Hold each prefill to so many tokens: vLLM reads this threshold at every step, 0 meaning none."""
        before: int = self.scheduler_config.long_prefill_token_threshold
        if cap_tokens is not None and not 0 < before < cap_tokens:
            self.scheduler_config.long_prefill_token_threshold = cap_tokens
        try:
            yield
        finally:
            self.scheduler_config.long_prefill_token_threshold = before

    def _account_for(self, output: SchedulerOutput) -> None:
        """Charge what this step runs of prompts to those that it passes."""
        row_of = self._requests.table.row_of
        if row_of:
            ran = [
                (row_of[request_id], num_tokens)
                for request_id, num_tokens in output.num_scheduled_tokens.items()
                # A decode is one token, and has no row any more.
                if num_tokens > 1 and request_id in row_of and is_prefilling_now(self.requests[request_id], num_tokens)
            ]
            if ran:
                self._order.charge(self._requests.table, ran)


def is_prefilling_now(request: Request, num_tokens: int) -> bool:
    """Whether the tokens that were just scheduled, and are counted as computed already, are of the prompt."""
    return bool(request.num_computed_tokens - num_tokens < request.num_prompt_tokens)
