"""Everything of vLLM that `vllm_hooks` touches, by name and signature: an upgrade that moves one fails here, named.

That nothing was forgotten is tested too (`vllm_paths`); how vLLM behaves there, in `test_vllm_behaviour`.
"""

import dataclasses
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import SchedulerConfig, VllmConfig
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue, SchedulingPolicy
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient
from vllm.v1.request import RequestStatus
from vllm.version import __version__

from serve_app.policies.free_block_queue import FreeBlockQueue
from serve_app.policies.vllm_hooks import FairwayScheduler, OrderedWaitingQueue
from tests.policies.scheduler_rig import make_request, make_scheduler
from tests.policies.vllm_paths import OURS, called_on_bases, touched_of_vllm

SIGNATURES: list[tuple[Callable[..., Any], list[str]]] = [
    (AsyncScheduler.schedule, ["self", "throttle_prefills"]),
    (AsyncScheduler._try_promote_blocked_waiting_request, ["self", "request"]),
    (RequestQueue.add_request, ["self", "request"]),
    (RequestQueue.pop_request, ["self"]),
    (RequestQueue.peek_request, ["self"]),
    (RequestQueue.prepend_request, ["self", "request"]),
    (RequestQueue.prepend_requests, ["self", "requests"]),
    (RequestQueue.remove_request, ["self", "request"]),
    (RequestQueue.remove_requests, ["self", "requests"]),
    (KVCacheManager.prefix_cache_lookup_enabled, ["self", "request"]),
    (KVCacheCoordinator.find_longest_cache_hit, ["self", "block_hashes", "max_cache_hit_length"]),
    (KVCacheManager.evict_blocks, ["self", "block_ids"]),
    (BlockHashToBlockMap.get_one_block, ["self", "key"]),
    (BlockHashToBlockMap.insert, ["self", "key", "block"]),
    (BlockHashToBlockMap.pop, ["self", "key", "block_id"]),
    (BlockHashToBlockMap.__init__, ["self"]),
    (make_block_hash_with_group_id, ["block_hash", "group_id"]),
    (FreeKVCacheBlockQueue.remove, ["self", "block"]),
    (FreeKVCacheBlockQueue.append_n, ["self", "blocks"]),
    (FreeKVCacheBlockQueue.get_all_free_blocks, ["self"]),
    (BlockPool.evict_blocks, ["self", "block_ids"]),
    (BlockPool.get_num_free_blocks, ["self"]),
    (BlockPool._remove_cached_block_hashes, ["self", "block"]),
    (BlockPool.reset_prefix_cache, ["self"]),
    (
        BlockPool.cache_full_blocks,
        [
            *("self", "request", "blocks", "num_cached_blocks", "num_full_blocks"),
            *("block_size", "kv_cache_group_id", "block_mask"),
        ],
    ),
    (AsyncMPClient.call_utility_async, ["self", "method", "args"]),
    (DPLBAsyncMPClient.call_utility_async, ["self", "method", "args"]),
]

ATTRIBUTES: dict[str, list[str]] = {
    "scheduler": [
        *("waiting", "skipped_waiting", "skipped_waiting.remove_requests", "running", "requests"),
        *("policy", "pause_state", "max_num_running_reqs", "num_waiting_for_streaming_input"),
        *("block_size", "max_num_scheduled_tokens", "scheduler_reserve_full_isl", "kv_cache_manager"),
        *("cache_config.enable_prefix_caching", "_try_promote_blocked_waiting_request"),
        *("scheduler_config.enable_chunked_prefill", "scheduler_config.long_prefill_token_threshold"),
    ],
    "manager": [
        *("block_pool", "coordinator", "watermark_blocks", "prefix_cache_lookup_enabled", "evict_blocks"),
        *("block_pool.get_num_free_blocks", "kv_cache_config.kv_cache_groups", "coordinator.single_type_managers"),
        *("coordinator.eagle_group_ids", "coordinator.find_longest_cache_hit"),
    ],
    "single_type_manager": ["req_to_blocks.values"],
    "group": ["kv_cache_spec"],
    "pool": [
        *("blocks", "num_gpu_blocks", "hash_block_size", "evict_blocks", "reset_prefix_cache"),
        *("free_block_queue", "free_block_queue.num_free_blocks", "free_block_queue.get_all_free_blocks"),
        *("cached_block_hash_to_block", "cached_block_hash_to_block.get_one_block"),
    ],
    "block": ["block_id", "ref_cnt", "block_hash", "is_null"],
    "request": [
        *("request_id", "status", "arrival_time", "priority", "block_hashes"),
        *("num_tokens", "num_prompt_tokens", "num_computed_tokens"),
    ],
    "output": ["num_scheduled_tokens", "scheduled_new_reqs", "total_num_scheduled_tokens"],
    "new_request": ["req_id"],
    "queue": ["clear", "extend"],
    "vllm_config": ["additional_config"],
    "core": ["scheduler"],
    "RequestStatus": ["WAITING", "RUNNING", "PREEMPTED", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"],
    "PauseState": ["UNPAUSED"],
    "SchedulingPolicy": ["PRIORITY"],
}
"""What each object of vLLM must have, as paths of attributes."""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> AsyncScheduler:
    return make_scheduler(tmp_path_factory.mktemp("model"), AsyncScheduler)


def test_vllm_is_the_version_that_these_names_were_read_from() -> None:
    assert __version__.startswith("0.29.0")


@pytest.mark.parametrize(("function", "parameters"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_function_takes_these_parameters(function: Callable[..., Any], parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters


def test_scheduler_is_constructed_with_its_configuration_first() -> None:
    assert list(inspect.signature(AsyncScheduler.__mro__[1].__init__).parameters)[:2] == ["self", "vllm_config"]


def owner_of(name: str, stock: AsyncScheduler) -> Any:
    manager = stock.kv_cache_manager
    owners: dict[str, Callable[[], Any]] = {
        "scheduler": lambda: stock,
        "manager": lambda: manager,
        "single_type_manager": lambda: manager.coordinator.single_type_managers[0],
        "group": lambda: manager.kv_cache_config.kv_cache_groups[0],
        "pool": lambda: manager.block_pool,
        "block": lambda: manager.block_pool.blocks[3],
        "request": lambda: make_request("r", [1, 2, 3], arrival_s=0.0),
        "output": stock.schedule,
        "queue": FCFSRequestQueue,
        "vllm_config": lambda: stock.vllm_config,
        "RequestStatus": lambda: RequestStatus,
        "PauseState": lambda: PauseState,
        "SchedulingPolicy": lambda: SchedulingPolicy,
    }
    return owners[name]()


@pytest.mark.parametrize(
    ("owner", "path"),
    [(owner, path) for owner, paths in ATTRIBUTES.items() for path in paths if owner not in ("new_request", "core")],
)
def test_object_of_vllm_has_this_attribute(stock: AsyncScheduler, owner: str, path: str) -> None:
    found = owner_of(owner, stock)
    for name in path.split("."):
        assert hasattr(found, name), f"{owner}.{path}: {type(found).__name__} has no {name}"
        found = getattr(found, name)


def test_objects_that_only_a_running_engine_makes_have_these_attributes() -> None:
    fields = {field.name for field in dataclasses.fields(NewRequestData)}
    assert set(ATTRIBUTES["new_request"]) <= fields
    assert set(ATTRIBUTES["output"]) <= {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert "self.scheduler" in inspect.getsource(EngineCore.__init__)
    assert "self.engine_core" in inspect.getsource(AsyncLLM.__init__)


def test_everything_that_the_hooks_touch_is_named_here() -> None:
    touched = {(file, owner, path) for file, owner, path in touched_of_vllm() if "__" not in path}
    assert len(touched) > 50
    named = {(owner, path) for owner, paths in ATTRIBUTES.items() for path in paths}
    # A dictionary's or list's own methods are not vLLM's.
    of_python = {f"{path}.{method}" for _, path in named for method in ("items", "values")}
    missing = {
        f"{file}: {owner}.{path}"
        for file, owner, path in touched
        if (owner, path) not in named and path not in of_python | OURS.get(owner, set())
    }
    assert not missing


def test_every_method_that_the_hooks_override_and_call_is_named_here_with_its_parameters() -> None:
    called = called_on_bases()
    assert {"schedule", "insert", "pop", "prepend_requests", "reset_prefix_cache"} <= called
    assert called - {"__init__"} <= {function.__name__ for function, _ in SIGNATURES}


def test_free_block_has_no_user_and_no_hash(stock: AsyncScheduler) -> None:
    block = stock.kv_cache_manager.block_pool.blocks[3]
    assert isinstance(block, KVCacheBlock)
    assert (block.block_id, block.ref_cnt, block.block_hash) == (3, 0, None)


def test_model_with_one_group_of_full_attention_has_these_managers(stock: AsyncScheduler) -> None:
    coordinator = stock.kv_cache_manager.coordinator
    assert type(coordinator) is UnitaryKVCacheCoordinator
    assert type(coordinator.single_type_managers[0]) is FullAttentionManager


def test_first_come_queue_is_a_deque_and_no_method_was_added_to_queues() -> None:
    assert issubclass(FCFSRequestQueue, deque)
    assert RequestQueue.__abstractmethods__ == {
        *("add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests"),
        *("remove_request", "remove_requests", "__bool__", "__len__", "__iter__"),
    }
    assert not OrderedWaitingQueue.__abstractmethods__


def test_statuses_and_states_have_these_names() -> None:
    assert {"WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STREAMING_REQ"} <= set(RequestStatus.__members__)
    assert list(PauseState.__members__) == ["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"]
    assert list(SchedulingPolicy.__members__) == ["FCFS", "PRIORITY"]


def test_our_free_queue_has_every_method_of_vllms() -> None:
    theirs = {name: value for name, value in vars(FreeKVCacheBlockQueue).items() if not name.startswith("_")}
    for name, method in theirs.items():
        ours = getattr(FreeBlockQueue, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(method).parameters), name


def test_scheduler_and_its_settings_are_chosen_by_vllms_own_arguments() -> None:
    assert "additional_config" in VllmConfig.__dataclass_fields__
    dotted_name = "serve_app.policies.vllm_hooks.FairwayScheduler"
    config = SchedulerConfig(max_model_len=64, is_encoder_decoder=False, scheduler_cls=dotted_name)
    assert config.get_scheduler_cls() is FairwayScheduler
    # vLLM turns asynchronous scheduling off for any other base.
    assert issubclass(FairwayScheduler, AsyncScheduler)
