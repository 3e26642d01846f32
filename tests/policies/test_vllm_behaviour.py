"""How vLLM behaves where `vllm_hooks` relies on it, checked on stock vLLM; the names are in `test_vllm_contract`."""

import queue
import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState

from tests.policies.scheduler_rig import BLOCK_SIZE, Engine, make_request, make_scheduler, prompt_of


def test_reset_of_the_prefix_cache_makes_a_new_map_and_instances_take_another_class_and_method(tmp_path: Path) -> None:
    pool = make_scheduler(tmp_path, AsyncScheduler).kv_cache_manager.block_pool
    before = pool.cached_block_hash_to_block
    assert type(before) is BlockHashToBlockMap
    assert pool.reset_prefix_cache()
    assert type(pool.cached_block_hash_to_block) is BlockHashToBlockMap
    assert pool.cached_block_hash_to_block is not before
    for instance in (pool, before):
        instance.__class__ = type("Derived", (type(instance),), {})


def test_blocks_are_evicted_by_id_through_the_pools_own_method(tmp_path: Path) -> None:
    manager = make_scheduler(tmp_path, AsyncScheduler).kv_cache_manager
    asked: list[set[int]] = []
    manager.block_pool.evict_blocks = asked.append
    manager.evict_blocks({1, 2})
    assert asked == [{1, 2}]


def test_look_up_answers_blocks_then_tokens_and_a_request_frees_its_last_block_first(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, AsyncScheduler)
    engine, prompt = Engine(scheduler), prompt_of(random.Random(1), 5 * BLOCK_SIZE)
    scheduler.add_request(make_request("r", prompt, arrival_s=0.0, max_tokens=2))
    engine.step()
    [blocks] = scheduler.kv_cache_manager.get_blocks("r").get_block_ids()
    engine.run_until_idle()
    free = [block.block_id for block in scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()]
    assert free[-5:] == blocks[4::-1]
    probe = make_request("probe", prompt, arrival_s=0.0)
    found = scheduler.kv_cache_manager.coordinator.find_longest_cache_hit(probe.block_hashes, probe.num_tokens - 1)
    assert [block.block_id for block in found[0][0]] == blocks[:4]
    assert found[1] == 4 * BLOCK_SIZE


def test_threshold_for_long_prefills_is_read_at_every_step_for_running_and_for_waiting(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, AsyncScheduler, max_num_batched_tokens=128)
    engine, rng = Engine(scheduler), random.Random(1)
    ran = []
    for threshold in (0, 50, 20):
        scheduler.scheduler_config.long_prefill_token_threshold = threshold
        scheduler.add_request(make_request(f"under {threshold}", prompt_of(rng, 400), arrival_s=0.0))
        ran.append(engine.step().num_scheduled_tokens)
    assert ran[0] == {"under 0": 128}
    assert ran[1] == {"under 0": 50, "under 50": 50}
    assert ran[2] == {"under 0": 20, "under 50": 20, "under 20": 20}


def test_engine_core_finds_utilities_by_name_on_its_class_and_carries_the_message_of_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_ours(core: EngineCore, changes: dict[str, Any]) -> dict[str, Any]:
        if not changes:
            raise ValueError("nothing to change")
        return {"changed": changes}

    monkeypatch.setattr(EngineCore, "of_ours", of_ours, raising=False)
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.shutdown_state, core.output_queue = EngineShutdownState.RUNNING, queue.Queue()
    for call, changes in enumerate(({"fast_weight": 8.0}, {})):
        core._handle_client_request(EngineCoreRequestType.UTILITY, (0, call, "of_ours", (changes,)))
    good, bad = (core.output_queue.get_nowait()[1].utility_output for _ in range(2))
    assert good.result.result == {"changed": {"fast_weight": 8.0}}
    # The replica tells a refusal from an engine's death by this text.
    assert bad.failure_message == "Call to of_ours method failed: nothing to change"
