"""vLLM's real block pool over each of our free lists: events, duplicates, resets, eviction by id, and live changes."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, maybe_convert_block_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from serve_app.policies.vllm_hooks.block_pool import EvictionName, install_eviction
from tests.policies.scheduler_rig import (
    BLOCK_SIZE,
    ClockedScheduler,
    Engine,
    full_attention,
    make_request,
    make_scheduler,
    prompt_of,
)
from tests.policies.test_vllm_hooks import sliding_window

NUM_BLOCKS = 25
"""One is vLLM's null block."""
NAMES: tuple[EvictionName, ...] = ("lru", "rlt", "adaptive")
each_eviction = pytest.mark.parametrize("name", NAMES)


def make_manager(*specs: KVCacheSpec) -> KVCacheManager:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs or (full_attention(),))]
    config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        max_model_len=1_024,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_kv_cache_events=True,
        log_stats=True,
    )


class Rig:
    """A pool under one eviction, and what a subscriber of its events believes."""

    def __init__(self, name: EvictionName, seed: int = 0) -> None:
        self.manager = make_manager()
        self.pool: Any = self.manager.block_pool
        self.free = install_eviction(self.manager, name, Random(seed))
        self.believed: Counter[Any] = Counter()
        self.removed: list[Any] = []
        self.num_requests = 0

    def start(self, prompt: list[int]) -> tuple[Any, int]:
        """Admit a request; returns it and how many of its tokens were cached."""
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", prompt, arrival_s=0.0)
        hit, num_hit_tokens, *_ = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, len(prompt) - num_hit_tokens, num_hit_tokens, hit) is not None
        self.check()
        return request, num_hit_tokens

    def blocks_of(self, request: Any) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self.manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
        return blocks

    def end(self, request: Any) -> None:
        self.manager.free(request)
        self.check()

    def serve(self, prompt: list[int]) -> int:
        request, num_hit_tokens = self.start(prompt)
        self.end(request)
        return num_hit_tokens

    def check(self) -> None:
        """The free list's law, that it knows of each block what the pool knows, and that the events say the same."""
        self.free.check_integrity()
        blocks: list[KVCacheBlock] = self.pool.blocks
        assert [self.free.is_cached(b.block_id) for b in blocks] == [b.block_hash is not None for b in blocks]
        assert [self.free.is_free(b.block_id) for b in blocks[1:]] == [b.ref_cnt == 0 for b in blocks[1:]]
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                self.believed.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                [lost] = event.block_hashes  # one event for each block lost
                assert self.believed[lost] > 0
                self.believed[lost] -= 1
                self.removed.append(lost)
            elif isinstance(event, AllBlocksCleared):
                self.believed.clear()
        assert +self.believed == Counter(external_hash(b) for b in blocks if b.block_hash is not None)


def external_hash(block: KVCacheBlock) -> Any:
    assert block.block_hash is not None
    return maybe_convert_block_hash(get_block_hash(block.block_hash))


@each_eviction
def test_each_lost_block_is_one_removal_event_in_the_order_of_eviction(name: EvictionName) -> None:
    rig, rng = Rig(name), Random(0)
    evicted: list[Any] = []
    take = rig.free.take

    def recorded_take(num: int) -> list[int]:
        before = {b.block_id: b.block_hash and external_hash(b) for b in rig.pool.blocks}
        taken = take(num)
        evicted.extend(before[block] for block in taken if before[block])
        return taken

    rig.free.take = recorded_take  # type: ignore[method-assign]
    for _ in range(60):
        rig.free.begin_step()
        rig.serve(prompt_of(rng, rng.randint(1, 10) * BLOCK_SIZE))
    assert len(evicted) > 100
    assert rig.removed == evicted


@each_eviction
def test_random_requests_keep_pool_free_list_and_events_in_step(name: EvictionName) -> None:
    rig, rng = Rig(name, seed=3), Random(3)
    prefixes = [prompt_of(rng, num_blocks * BLOCK_SIZE) for num_blocks in (2, 4, 6)]
    running: list[Any] = []
    num_hit_tokens = 0
    for _ in range(300):
        rig.free.begin_step()
        prefix = rng.choice(prefixes)
        prompt = prefix[: rng.randint(1, len(prefix))] + prompt_of(rng, rng.randint(1, 40))
        if len(prompt) // BLOCK_SIZE + 2 <= rig.free.num_free and len(running) < 3:
            request, found = rig.start(prompt)
            running.append(request)
            num_hit_tokens += found
        elif running:
            rig.end(running.pop(rng.randrange(len(running))))
        if rng.random() < 0.05:
            # Of free and of used blocks alike.
            rig.manager.evict_blocks(set(rng.sample(range(1, NUM_BLOCKS), 3)))
            rig.check()
        if rng.random() < 0.02:
            assert rig.manager.reset_prefix_cache() == (not running)
            rig.check()
    assert num_hit_tokens > 100 * BLOCK_SIZE
    assert len(rig.removed) > 100


@each_eviction
def test_duplicates_of_one_prefix_are_evicted_one_by_one_and_the_other_still_hits(name: EvictionName) -> None:
    rig, rng = Rig(name), Random(1)
    prompt = prompt_of(rng, 4 * BLOCK_SIZE + 1)
    first = make_request("first", prompt, arrival_s=0.0)
    second = make_request("second", prompt, arrival_s=0.0)
    # Both look before either is computed.
    for request in (first, second):
        assert rig.manager.allocate_slots(request, len(prompt)) is not None
    rig.check()
    assert set(rig.believed.values()) == {2}
    rig.end(first)
    rig.end(second)
    rig.manager.evict_blocks({b.block_id for b in rig.pool.blocks[1:6]})
    rig.check()
    assert rig.serve(prompt) == 4 * BLOCK_SIZE


@each_eviction
def test_reset_forgets_every_block_and_is_refused_while_a_request_runs(name: EvictionName) -> None:
    rig, rng = Rig(name), Random(7)
    prompt = prompt_of(rng, 4 * BLOCK_SIZE)
    rig.serve(prompt)
    request, _ = rig.start(prompt)
    assert not rig.manager.reset_prefix_cache()
    rig.check()
    rig.end(request)
    assert rig.manager.reset_prefix_cache()
    rig.check()
    assert not +rig.believed
    assert rig.serve(prompt) == 0


@each_eviction
def test_partial_last_block_is_worth_nothing_and_goes_first(name: EvictionName) -> None:
    rig, rng = Rig(name), Random(2)
    request, _ = rig.start(prompt_of(rng, 2 * BLOCK_SIZE + 5))
    partial = rig.blocks_of(request)[-1]
    assert partial.block_hash is None
    rig.end(request)
    assert rig.pool.get_new_blocks(1) == [partial]


@each_eviction
def test_prefix_cache_statistics_are_as_without_us_while_nothing_is_evicted(name: EvictionName, tmp_path: Path) -> None:
    prompt = prompt_of(Random(4), 5 * BLOCK_SIZE)
    found: dict[Any, list[tuple[int, int, int]]] = {}
    for scheduler_cls in (AsyncScheduler, ClockedScheduler):
        scheduler = make_scheduler(tmp_path, scheduler_cls, {"eviction": name, "ordering": "fcfs"})
        engine = Engine(scheduler, max_in_flight=2)
        found[scheduler_cls] = []
        for number in range(2):
            scheduler.add_request(make_request(f"r{number}", prompt, arrival_s=0.0, max_tokens=1))
            engine.step()  # the answer, and with it vLLM's own reading of the statistics, is in flight
            stats = scheduler.kv_cache_manager.make_prefix_cache_stats()
            found[scheduler_cls].append((stats.requests, stats.queries, stats.hits))
            engine.run_until_idle()
    assert found[AsyncScheduler] == [(1, len(prompt), 0), (1, len(prompt), 4 * BLOCK_SIZE)]
    assert found[ClockedScheduler] == found[AsyncScheduler]


@each_eviction
def test_pinned_hit_survives_what_would_fill_the_pool(name: EvictionName) -> None:
    rig, rng = Rig(name), Random(5)
    prompt = prompt_of(rng, 6 * BLOCK_SIZE)
    request, _ = rig.start(prompt)
    deepest = rig.blocks_of(request)[5].block_id
    rig.end(request)
    rig.free.pin(deepest)
    for _ in range(10):
        rig.free.begin_step()
        rig.serve(prompt_of(rng, 15 * BLOCK_SIZE))
    assert rig.serve(prompt) == 5 * BLOCK_SIZE
    rig.free.unpin(deepest)
    rig.check()


@pytest.mark.parametrize("specs", [[sliding_window()], [full_attention(), sliding_window()]])
@each_eviction
def test_model_that_is_not_one_group_of_full_attention_is_refused(specs: list[KVCacheSpec], name: EvictionName) -> None:
    manager = make_manager(*specs)
    message = f"eviction='{name}' needs one KV cache group, of full attention, not .*SlidingWindowSpec.*'lru'"
    with pytest.raises(ValueError, match=message):
        install_eviction(manager, name, Random(0))
    assert type(manager.block_pool) is BlockPool


@each_eviction
def test_same_eviction_installed_again_is_the_same(name: EvictionName) -> None:
    rig = Rig(name)
    assert install_eviction(rig.manager, name, Random(1)) is rig.free


@pytest.mark.parametrize("after", NAMES)
@pytest.mark.parametrize("before", ["vllm", *NAMES])
def test_eviction_changes_in_a_running_pool_without_loss(before: Any, after: EvictionName) -> None:
    rng = Random(6)
    rig = Rig(before) if before != "vllm" else PlainRig()
    prompts = [prompt_of(rng, 5 * BLOCK_SIZE) for _ in range(4)]
    for prompt in prompts:
        rig.serve(prompt)
    running = prompts[3][: 3 * BLOCK_SIZE] + prompt_of(rng, 20)
    request, _ = rig.start(running)
    rig.free = install_eviction(rig.manager, after, Random(0))
    rig.check()
    rig.free.pin(rig.blocks_of(request)[3].block_id)
    assert [rig.serve(prompt) for prompt in reversed(prompts)] == 4 * [4 * BLOCK_SIZE]
    rig.end(request)
    for _ in range(20):
        rig.free.begin_step()
        rig.serve(prompt_of(rng, 7 * BLOCK_SIZE))
    assert len(rig.removed) > 50
    assert rig.serve(running) == 4 * BLOCK_SIZE  # what ran during the change is one chain, kept by its pinned end


class PlainRig(Rig):
    """Begins on vLLM's own queue."""

    def __init__(self) -> None:
        super().__init__("lru")
        self.manager = make_manager()
        self.pool = self.manager.block_pool

    def check(self) -> None:
        if type(self.pool) is not BlockPool:
            super().check()
