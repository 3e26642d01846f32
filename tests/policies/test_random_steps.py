"""Thousands of seeded random steps of vLLM's real scheduler under our policies, everything checked after each."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from serve_app.policies.vllm_hooks import PolicyBlockPool
from tests.policies.scheduler_rig import (
    ClockedScheduler,
    Engine,
    check_scheduler,
    make_request,
    make_scheduler,
    prompt_of,
)
from tests.policies.slow_references import slow_waiting_order


class ReferenceScheduler(ClockedScheduler):
    """Every order recomputed by the slow reference, from vLLM's own prefix look-up."""

    def _waiting_order(self, rows: Any) -> Any:
        order = super()._waiting_order(rows)
        requests = [self._requests.table.requests[row] for row in rows.tolist()]
        hit = [self.fresh_hit_tokens(request) for request in requests]
        todo = [r.num_tokens - h for r, h in zip(requests, hit, strict=True)]
        waited = [self.now_s - r.arrival_time for r in requests]
        prefill = [self._prefill_profile.prefill_s_one(r.num_prompt_tokens) for r in requests]
        arrival = [r.arrival_time for r in requests]
        assert order.tolist() == slow_waiting_order(self._order.params, hit, todo, waited, prefill, arrival)
        return order


CASES: dict[str, tuple[type[ClockedScheduler], dict[str, Any], dict[str, Any]]] = {
    "fairway-rlt": (ClockedScheduler, {"ordering": "fairway", "eviction": "rlt"}, {}),
    "fairway-rlt-against-reference": (ReferenceScheduler, {"ordering": "fairway"}, {}),
    "carried-rlt": (ClockedScheduler, {"eviction": "rlt"}, {}),
    "carried-lru": (ClockedScheduler, {"eviction": "lru", "long_prefill_share": 0.25}, {}),
    "carried-rlt-priority": (ClockedScheduler, {}, {"policy": "priority"}),
    "fairway-lru": (ClockedScheduler, {"ordering": "fairway", "eviction": "lru"}, {}),
    "fairway-adaptive": (ClockedScheduler, {"eviction": "adaptive"}, {}),
    "fcfs-rlt": (ClockedScheduler, {"ordering": "fcfs", "eviction": "rlt"}, {}),
    "lpm-lru": (ClockedScheduler, {"ordering": "lpm", "eviction": "lru"}, {}),
    "fairway-rlt-priority": (ClockedScheduler, {}, {"policy": "priority"}),
    "fairway-no-prefix-caching": (ClockedScheduler, {}, {"prefix_caching": False}),
    "fairway-rlt-protected": (ClockedScheduler, {"protect_waiting": True}, {}),
    "peek-lru-protected": (ClockedScheduler, {"ordering": "peek", "eviction": "lru", "protect_waiting": True}, {}),
    "fcfs-rlt-protected-priority": (
        ClockedScheduler,
        {"ordering": "fcfs", "protect_waiting": True},
        {"policy": "priority"},
    ),
}


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_over_thousands_of_random_steps(case: str, max_in_flight: int, tmp_path: Path) -> None:
    scheduler_cls, fairway, options = CASES[case]
    scheduler = make_scheduler(tmp_path, scheduler_cls, fairway, **options)
    engine = Engine(scheduler, max_in_flight)
    life = RandomLife(engine, exact_hits=scheduler_cls is ReferenceScheduler)
    for _ in range(400):
        life.step()
    engine.run_until_idle()
    check_scheduler(engine, set())
    assert life.num_aborts > 10
    assert engine.num_preemptions > 3
    assert scheduler.num_orders > 100
    assert engine.finished | life.aborted == life.added
    if options.get("prefix_caching", True):
        assert life.num_hits > 10


class RandomLife:
    """Adds, aborts, resets and evicts at random around an engine's steps, checking everything after each."""

    def __init__(self, engine: Engine, exact_hits: bool, seed: int = 0) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.rng = random.Random(seed)
        # A hole in a chain makes our search of hits differ from vLLM's scan, by design.
        self.evicts_by_id = not exact_hits
        self.prefixes = [prompt_of(self.rng, num_tokens) for num_tokens in (40, 100, 160, 400)]
        self.added: set[str] = set()
        self.aborted: set[str] = set()
        self.num_aborts = self.num_hits = 0

    def step(self) -> None:
        self.scheduler.now_s += self.rng.expovariate(4.0)
        for _ in range(self.rng.choice([0, 0, 0, 1, 1, 3])):
            if len(self.scheduler.requests) < 30:
                self._add()
        if self.rng.random() < 0.08:
            self._abort()
        if self.rng.random() < 0.02:
            self.scheduler.reset_prefix_cache(reset_running_requests=self.rng.random() < 0.5)
        if self.evicts_by_id and self.rng.random() < 0.02:
            self._evict_by_id()
        output = self.engine.step()
        self.num_hits += sum(new.num_computed_tokens > 0 for new in output.scheduled_new_reqs)
        check_scheduler(self.engine, self.added - self.engine.finished - self.aborted)
        self._check_eviction()

    def _add(self) -> None:
        request_id = f"r{len(self.added)}"
        prefix = self.rng.choice(self.prefixes)[: self.rng.randint(0, 400)]
        prompt = prefix + prompt_of(self.rng, self.rng.choice([1, 5, 30, 300]))
        request = make_request(
            request_id,
            prompt,
            arrival_s=self.scheduler.now_s,
            max_tokens=self.rng.choice([1, 4, 60]),
            priority=self.rng.randint(0, 2),
            skip_reading_prefix_cache=None if not self.evicts_by_id else self.rng.random() < 0.1,
        )
        self.added.add(request_id)
        self.scheduler.add_request(request)

    def _abort(self) -> None:
        alive = sorted(self.scheduler.requests)
        if alive:
            request_id = self.rng.choice(alive)
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self.aborted.add(request_id)
            self.num_aborts += 1

    def _evict_by_id(self) -> None:
        ids = set(self.rng.sample(range(1, 80), 3))
        self.engine.uncached_by_id |= ids
        self.scheduler.kv_cache_manager.evict_blocks(ids)

    def _check_eviction(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        if isinstance(pool, PolicyBlockPool):
            free = pool.free_block_queue.free
            free.check_integrity()
            assert [free.is_cached(b.block_id) for b in pool.blocks] == [b.block_hash is not None for b in pool.blocks]
            assert [free.is_free(b.block_id) for b in pool.blocks[1:]] == [b.ref_cnt == 0 for b in pool.blocks[1:]]
