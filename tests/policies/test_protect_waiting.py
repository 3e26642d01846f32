"""Blocks that waiting requests would hit count as just used: the free lists' `touch`, and the scheduler around it."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from serve_app.policies import LruFreeBlocks
from serve_app.policies.eviction import touch_order
from serve_app.policies.vllm_hooks import PrefixLookup
from tests.policies.scheduler_rig import (
    BLOCK_SIZE,
    ClockedScheduler,
    Engine,
    check_scheduler,
    make_request,
    make_scheduler,
    prompt_of,
)
from tests.policies.test_eviction import MakeFree, cached_chain, each_policy, rlt
from tests.policies.test_vllm_hooks import sliding_window

EXCERPT_BLOCKS = 20
each_eviction = pytest.mark.parametrize("eviction", ["lru", "rlt"])


@each_policy
def test_touched_block_outlives_others_that_were_used_as_lately(make: MakeFree) -> None:
    free = make(6)
    blocks = free.take(6)
    for block in blocks:
        free.cache(block, None)
    free.release(blocks)
    free.begin_step()
    free.take(1)  # RLT begins a phase here, without marks
    kept = [block for block in blocks if free.is_free(block)][:3]
    free.touch(kept)
    free.check_integrity()
    assert set(free.take(2)).isdisjoint(kept)
    assert set(free.take(3)) == set(kept)


@each_policy
def test_touch_of_a_used_or_an_uncached_block_is_refused(make: MakeFree) -> None:
    free = make(3)
    [used] = cached_chain(free, 1)
    for block in (used, 2):
        with pytest.raises(ValueError, match=f"block {block} is not both free and cached"):
            free.touch([block])


@each_policy
def test_everything_touched_still_yields_every_block(make: MakeFree) -> None:
    free = make(8)
    chain = cached_chain(free, 8)
    free.release(reversed(chain))
    free.begin_step()
    free.touch(reversed(chain))
    assert free.take(8) == list(reversed(chain))


def test_lru_evicts_touched_blocks_in_the_order_of_touching() -> None:
    free = LruFreeBlocks(4, range(4))
    chain = cached_chain(free, 4)
    free.release(chain)
    free.touch([chain[1], chain[0]])
    assert free.take(4) == [chain[2], chain[3], chain[1], chain[0]]


def test_rlt_touch_of_a_chains_end_keeps_the_whole_chain() -> None:
    for seed in range(30):
        free = rlt(12, seed)
        old, needed = cached_chain(free, 6), cached_chain(free, 6)
        free.release([*reversed(old), *reversed(needed)])
        free.begin_step()
        free.touch([needed[3]])
        # The needed chain's own end, past the touched block, may go as well.
        assert set(free.take(8)) == {*old, *needed[4:]}


def test_touch_order_puts_descendants_first_and_the_first_request_last() -> None:
    first, second, third = [3, 2, 1, 0], [5, 4, 1, 0], [9, 8]
    assert touch_order([first, second, third]) == [9, 8, 5, 4, 3, 2, 1, 0]
    assert touch_order([first, first]) == first
    assert touch_order([]) == []


def test_touch_order_reads_a_chain_only_up_to_a_known_block() -> None:
    read: list[int] = []

    def chain(*blocks: int) -> Any:
        return (read.append(block) or block for block in blocks)  # type: ignore[func-returns-value]

    touch_order([chain(3, 2, 1, 0), chain(4, 1, 0)])
    assert read == [3, 2, 1, 0, 4, 1]


def tokens_cached_when_the_hit_starts(directory: Path, fairway: dict[str, Any], seed: int) -> int:
    """An excerpt is cached, and a hit of it waits while one request runs that needs more blocks than are uncached."""
    scheduler = make_scheduler(directory, ClockedScheduler, fairway | {"seed": seed}, num_blocks=80, max_num_seqs=1)
    engine, rng = Engine(scheduler, seed=seed), random.Random(seed)
    excerpt = prompt_of(rng, EXCERPT_BLOCKS * BLOCK_SIZE)
    for name, prompt in [("warm", excerpt), ("filler", prompt_of(rng, 40 * BLOCK_SIZE))]:
        scheduler.add_request(make_request(name, prompt, arrival_s=0.0, max_tokens=1))
        engine.run_until_idle()
    scheduler.add_request(make_request("hog", prompt_of(rng, 500), arrival_s=1.0, max_tokens=300))
    engine.step()
    scheduler.add_request(make_request("hit", [*excerpt, 1], arrival_s=2.0))
    while True:
        for new in engine.step().scheduled_new_reqs:
            if new.req_id == "hit":
                return int(new.num_computed_tokens)


@each_eviction
@pytest.mark.parametrize("ordering", ["fairway", "fcfs", "peek"])
def test_hit_of_a_waiting_request_is_still_there_when_it_starts(ordering: str, eviction: str, tmp_path: Path) -> None:
    found = {}
    for protect in (False, True):
        fairway = {"ordering": ordering, "eviction": eviction, "protect_waiting": protect}
        found[protect] = [tokens_cached_when_the_hit_starts(tmp_path, fairway, seed) for seed in range(5)]
    assert found[True] == [EXCERPT_BLOCKS * BLOCK_SIZE] * 5
    assert sum(found[False]) < 5 * EXCERPT_BLOCKS * BLOCK_SIZE / 2


@each_eviction
def test_protection_on_a_cache_that_is_all_needed_evicts_nonetheless(eviction: str, tmp_path: Path) -> None:
    fairway = {"eviction": eviction, "protect_waiting": True}
    scheduler = make_scheduler(tmp_path, ClockedScheduler, fairway, num_blocks=40, max_num_seqs=2)
    engine, rng = Engine(scheduler), random.Random(1)
    excerpts = [prompt_of(rng, 12 * BLOCK_SIZE) for _ in range(3)]
    for number, excerpt in enumerate(excerpts):
        scheduler.add_request(make_request(f"warm{number}", excerpt, arrival_s=0.0, max_tokens=1))
        engine.run_until_idle()
    scheduler.add_request(make_request("miss", prompt_of(rng, 30 * BLOCK_SIZE), arrival_s=1.0))
    hits = [f"hit{number}" for number in range(3)]
    for name, excerpt in zip(hits, excerpts, strict=True):
        scheduler.add_request(make_request(name, [*excerpt, 1], arrival_s=2.0))
    for _ in range(200):
        engine.step()
        check_scheduler(engine, {"miss", *hits} - engine.finished)
    assert engine.finished == {"warm0", "warm1", "warm2", "miss", *hits}


@each_eviction
def test_protection_ends_with_the_request_that_waited(eviction: str, tmp_path: Path) -> None:
    fairway = {"ordering": "fcfs", "eviction": eviction, "protect_waiting": True}
    scheduler = make_scheduler(tmp_path, ClockedScheduler, fairway, num_blocks=80, max_num_seqs=1)
    engine, rng = Engine(scheduler), random.Random(2)
    excerpt = prompt_of(rng, EXCERPT_BLOCKS * BLOCK_SIZE)
    scheduler.add_request(make_request("warm", excerpt, arrival_s=0.0, max_tokens=1))
    engine.run_until_idle()
    scheduler.add_request(make_request("first", prompt_of(rng, 100), arrival_s=1.0))
    scheduler.add_request(make_request("hit", [*excerpt, 1], arrival_s=2.0))
    engine.step()
    scheduler.finish_requests("hit", RequestStatus.FINISHED_ABORTED)
    for number in range(3):
        scheduler.add_request(make_request(f"filler{number}", prompt_of(rng, 50 * BLOCK_SIZE), arrival_s=3.0))
    engine.run_until_idle()
    probe = make_request("probe", [*excerpt, 2], arrival_s=4.0)
    scheduler._prefix_lookup.begin_step()
    [tokens] = scheduler._prefix_lookup.hit_tokens([probe])
    assert tokens < EXCERPT_BLOCKS * BLOCK_SIZE


def test_protection_without_one_group_of_full_attention_is_refused_and_without_a_cache_is_idle(tmp_path: Path) -> None:
    fairway = {"eviction": "lru", "protect_waiting": True}
    message = r"protect_waiting=True needs one KV cache group, of full attention, not \['SlidingWindowSpec'\].*False"
    with pytest.raises(ValueError, match=message):
        make_scheduler(tmp_path, ClockedScheduler, fairway, specs=[sliding_window()])
    scheduler = make_scheduler(tmp_path, ClockedScheduler, fairway, prefix_caching=False)
    engine = Engine(scheduler)
    scheduler.add_request(make_request("r", [1] * 40, arrival_s=0.0))
    engine.run_until_idle()
    assert engine.finished == {"r"}


class CountingLookup(PrefixLookup):
    """Counts the requests that it is asked for."""

    num_asked = 0

    def hit_tokens(self, requests: list[Request]) -> list[int]:
        self.num_asked += len(requests)
        return super().hit_tokens(requests)


@pytest.mark.parametrize(
    ("ordering", "protect", "asks"), [("fcfs", False, False), ("fcfs", True, True), ("lpm", False, True)]
)
def test_fcfs_looks_up_no_hits_unless_they_are_protected(
    ordering: str, protect: bool, asks: bool, tmp_path: Path
) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {"ordering": ordering, "protect_waiting": protect})
    lookup = scheduler._prefix_lookup = CountingLookup(scheduler.kv_cache_manager)
    engine, rng = Engine(scheduler), random.Random(3)
    for number in range(12):
        scheduler.add_request(make_request(f"r{number}", prompt_of(rng, 100), arrival_s=number))
    engine.run_until_idle()
    assert scheduler.num_orders > 0
    assert (lookup.num_asked > 0) == asks
