"""Blocks that waiting requests would hit are kept until these start: the scheduler around the free lists' pins."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.policies.scheduler_rig import (
    BLOCK_SIZE,
    ClockedScheduler,
    Engine,
    check_scheduler,
    make_request,
    make_scheduler,
    prompt_of,
)
from tests.policies.test_vllm_hooks import sliding_window

EXCERPT_BLOCKS = 20
each_eviction = pytest.mark.parametrize("eviction", ["lru", "rlt"])


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
@pytest.mark.parametrize("ordering", ["fairway-carried", "fairway", "fcfs", "peek"])
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
    assert scheduler.fresh_hit_tokens(probe) < EXCERPT_BLOCKS * BLOCK_SIZE


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
