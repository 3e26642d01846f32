"""Our scheduler and block pool inside vLLM's real scheduler, without a model."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from serve_app.policies import LruFreeBlocks
from serve_app.policies.vllm_hooks import CachedPrefixes, FairwayScheduler, PolicyBlockPool
from tests.policies.scheduler_rig import (
    BLOCK_SIZE,
    ClockedScheduler,
    Engine,
    full_attention,
    make_request,
    make_scheduler,
    prompt_of,
)


def test_fcfs_with_lru_schedules_what_stock_vllm_does(tmp_path: Path) -> None:
    engines = []
    for scheduler_cls in (AsyncScheduler, FairwayScheduler):
        scheduler = make_scheduler(tmp_path, scheduler_cls, {"ordering": "fcfs", "eviction": "lru"})
        engine, rng = Engine(scheduler), random.Random(5)
        prefixes = [prompt_of(rng, 200) for _ in range(4)]
        for number in range(200):
            prompt = rng.choice(prefixes)[: rng.randint(0, 200)] + prompt_of(rng, rng.choice([1, 20, 200]))
            scheduler.add_request(make_request(f"r{number}", prompt, arrival_s=number, max_tokens=rng.choice([1, 40])))
            engine.step()
        engine.run_until_idle()
        engines.append(engine)
    stock, ours = engines
    assert stock.num_preemptions > 0
    assert ours.trace == stock.trace


def test_short_hits_start_before_an_older_long_miss(tmp_path: Path) -> None:
    started = {}
    for scheduler_cls in (AsyncScheduler, ClockedScheduler):
        scheduler = make_scheduler(
            tmp_path,
            scheduler_cls,
            {"ordering": "fairway"},
            num_blocks=400,
            max_num_seqs=16,
            max_num_batched_tokens=4_096,
            max_model_len=2_048,
        )
        engine, rng = Engine(scheduler), random.Random(1)
        excerpt = prompt_of(rng, 640)
        scheduler.add_request(make_request("warm", excerpt, arrival_s=0.0, max_tokens=1))
        engine.run_until_idle()
        scheduler.add_request(make_request("miss", prompt_of(rng, 1_500), arrival_s=0.1))
        for number in range(8):
            prompt = excerpt + prompt_of(rng, 80)
            scheduler.add_request(make_request(f"hit{number}", prompt, arrival_s=0.2 + number / 100))
        scheduler.now_s = 1.0
        engine.run_until_idle()
        started[scheduler_cls] = engine.started[1:]
    hits = [f"hit{number}" for number in range(8)]
    assert started[AsyncScheduler] == ["miss", *hits]
    # The Fast ledger starts at 4 x 80 = 320, and the fourth hit takes it to 1,600, past the miss's 1,500.
    assert started[ClockedScheduler] == [*hits[:4], "miss", *hits[4:]]


def test_priority_is_the_outer_order(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, FairwayScheduler, policy="priority", max_num_seqs=1)
    engine, rng = Engine(scheduler), random.Random(1)
    excerpt = prompt_of(rng, 320)
    scheduler.add_request(make_request("warm", excerpt, arrival_s=0.0, max_tokens=1))
    engine.run_until_idle()
    scheduler.add_request(make_request("low-hit", [*excerpt, 1], arrival_s=1.0, priority=1))
    scheduler.add_request(make_request("high-miss", prompt_of(rng, 600), arrival_s=2.0, priority=0))
    scheduler.add_request(make_request("high-hit", [*excerpt, 2], arrival_s=3.0, priority=0))
    engine.run_until_idle()
    assert engine.started[1:] == ["high-hit", "high-miss", "low-hit"]


def test_preempted_request_keeps_its_arrival_in_the_order(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {"ordering": "fcfs"}, num_blocks=20)
    engine, rng = Engine(scheduler), random.Random(2)
    for number in range(3):
        scheduler.add_request(make_request(f"r{number}", prompt_of(rng, 90), arrival_s=number, max_tokens=100))
    while len(scheduler.running) < 3:
        engine.step()
    while not scheduler.waiting:
        engine.step()
    [preempted] = scheduler.waiting
    scheduler.add_request(make_request("later", prompt_of(rng, 10), arrival_s=50.0))
    scheduler.add_request(make_request("earlier", prompt_of(rng, 10), arrival_s=-1.0))
    scheduler._sync()
    scheduler._reorder_waiting()
    assert [request.request_id for request in scheduler.waiting] == ["earlier", preempted.request_id, "later"]


def test_request_whose_grammar_is_ready_takes_its_place_and_one_that_waits_stays(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {"ordering": "fcfs"}, max_num_seqs=1)
    rng = random.Random(3)
    requests = {name: make_request(name, prompt_of(rng, 20), arrival_s=i) for i, name in enumerate("abc")}
    for name, grammar in (("b", object()), ("c", None)):
        requests[name].status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        requests[name].structured_output_request = StructuredOutputRequest(params=None)
        requests[name].structured_output_request.grammar = grammar
    for name in "cba":
        scheduler.add_request(requests[name])
    scheduler._take_back_ready_requests()
    scheduler._sync()
    scheduler._reorder_waiting()
    assert [request.request_id for request in scheduler.waiting] == ["a", "b"]
    assert [request.request_id for request in scheduler.skipped_waiting] == ["c"]


def test_followed_prefixes_equal_vllms_look_up_and_leave_no_trace(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, AsyncScheduler, num_blocks=60)
    engine, rng = Engine(scheduler), random.Random(4)
    manager, prefixes = scheduler.kv_cache_manager, CachedPrefixes(scheduler.kv_cache_manager)
    excerpt = prompt_of(rng, 480)
    asked = [make_request(f"q{n}", excerpt[:n], arrival_s=0.0) for n in (1, 16, 17, 32, 33, 320, 480)]
    asked.append(make_request("skips", excerpt, arrival_s=0.0, skip_reading_prefix_cache=True))
    rows = range(len(asked))
    for row, request in zip(rows, asked, strict=True):
        prefixes.follow(row, request)
    found: dict[int, int] = {}
    num_updates = 0
    for number in range(40):
        prompt = excerpt[: rng.randint(1, 480)] if number % 2 else prompt_of(rng, 300)
        scheduler.add_request(make_request(f"r{number}", prompt, arrival_s=number, max_tokens=1))
        engine.run_until_idle()
        recorded = manager.prefix_cache_stats.queries, manager.prefix_cache_stats.requests
        changed = prefixes.update()
        num_updates += len(changed)
        found |= changed
        assert recorded == (manager.prefix_cache_stats.queries, manager.prefix_cache_stats.requests)
        assert not manager.block_pool.kv_event_queue
        assert [found[row] for row in rows] == [manager.get_computed_blocks(one)[1] for one in asked]
        prefixes.check_integrity()
    assert max(found.values()) >= 16
    assert num_updates < 40 * len(asked) / 2
    asked[0].num_computed_tokens = 96  # as after a load from a remote KV cache
    prefixes.look_again(0)
    assert prefixes.update() == {0: 96}
    assert prefixes.update() == {}
    for row in rows:
        prefixes.forget(row)
    prefixes.check_integrity()


@pytest.mark.parametrize(
    ("fairway", "message"),
    [
        ({"fast_weight": 0.5}, r'additional_config\["fairway"\]: fast_weight=0\.5: .*greater than or equal to 1'),
        (
            {"ordering": "sjf"},
            r"ordering='sjf': Input should be 'fairway-carried', 'fairway', .* or 'fairway-absolute-wait'",
        ),
        ({"colour": "red"}, r"colour='red': Extra inputs are not permitted"),
        ({"prefill_profile": {"tokens": [2]}}, r"prefill_profile\.tokens=\[2\]: .*at least 2"),
        ("on", r"fairway='on': "),
    ],
)
def test_bad_setting_stops_the_engine_with_name_value_and_bound(fairway: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(tmp_path, FairwayScheduler, fairway)


def test_missing_settings_mean_the_defaults_and_a_configured_profile_is_used(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, FairwayScheduler)
    assert scheduler.engine_policy.ordering == "fairway-carried"
    assert isinstance(scheduler.kv_cache_manager.block_pool, PolicyBlockPool)
    profile: dict[str, Any] = {"device": "d", "model": "m", "dtype": "f", "vllm_version": "v", "date": "2026-01-01"}
    profile |= {"tokens": [10, 20], "seconds": [1.0, 3.0]}
    scheduler = make_scheduler(tmp_path, FairwayScheduler, {"prefill_profile": profile})
    assert scheduler._prefill_profile.prefill_s(np.array([20])).tolist() == [3.0]


def sliding_window() -> KVCacheSpec:
    return SlidingWindowSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=64)


@pytest.mark.parametrize("specs", [[sliding_window()], [full_attention(), sliding_window()]])
def test_rlt_is_refused_without_one_group_of_full_attention_and_lru_works(
    specs: list[KVCacheSpec], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"eviction='rlt' needs one KV cache group, of full attention, not .*'lru'"):
        make_scheduler(tmp_path, FairwayScheduler, {"eviction": "rlt"}, specs=specs)
    scheduler = make_scheduler(tmp_path, FairwayScheduler, {"eviction": "lru"}, specs=specs, max_num_seqs=1)
    engine, rng = Engine(scheduler), random.Random(1)
    excerpt = prompt_of(rng, 320)
    scheduler.add_request(make_request("warm", excerpt, arrival_s=0.0, max_tokens=1))
    engine.run_until_idle()
    scheduler.add_request(make_request("miss", prompt_of(rng, 600), arrival_s=1.0))
    scheduler.add_request(make_request("hit", [*excerpt, 1], arrival_s=2.0))
    engine.run_until_idle()
    assert engine.started[1:] == ["hit", "miss"]


def test_lru_equals_vllms_own_free_queue() -> None:
    rng = random.Random(7)
    blocks = [KVCacheBlock(block_id) for block_id in range(30)]
    theirs, ours = FreeKVCacheBlockQueue(blocks), LruFreeBlocks(30, range(30))
    used: list[int] = []
    for _ in range(2_000):
        if rng.random() < 0.5:
            num = rng.randint(0, ours.num_free)
            taken = ours.take(num)
            assert [block.block_id for block in theirs.popleft_n(num)] == taken
            used += taken
            for block in taken:
                if rng.random() < 0.7:
                    ours.cache(block, None)
        elif used:
            rng.shuffle(used)
            freed, used = used[:5], used[5:]
            theirs.prepend_n([blocks[block] for block in freed if not ours.is_cached(block)])
            theirs.append_n([blocks[block] for block in freed if ours.is_cached(block)])
            ours.release(freed)
        assert [block.block_id for block in theirs.get_all_free_blocks()] == ours.free_blocks()
        ours.check_integrity()


def test_rlt_queue_walks_the_free_blocks_after_a_cursor(tmp_path: Path) -> None:
    queue = make_scheduler(tmp_path, FairwayScheduler, num_blocks=6).kv_cache_manager.block_pool.free_block_queue
    free = queue.get_all_free_blocks()
    assert list(queue.iter_blocks_after(None)) == free
    assert list(queue.iter_blocks_after(free[1])) == free[2:]
    taken = queue.popleft()
    assert list(queue.iter_blocks_after(taken)) == free[1:]
    queue.append(taken)
    assert queue.num_free_blocks == 5
