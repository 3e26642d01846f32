"""Everything of vLLM that `vllm_hooks` touches, by name and signature: an upgrade that moves one fails here, named."""

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import SchedulerConfig, VllmConfig
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue, SchedulingPolicy
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus
from vllm.version import __version__

from serve_app.policies.free_block_queue import FreeBlockQueue
from serve_app.policies.vllm_hooks import FairwayScheduler, OrderedWaitingQueue
from tests.policies.scheduler_rig import make_request, make_scheduler

SIGNATURES: list[tuple[Callable[..., Any], list[str]]] = [
    (AsyncScheduler.schedule, ["self", "throttle_prefills"]),
    (AsyncScheduler._try_promote_blocked_waiting_request, ["self", "request"]),
    (RequestQueue.add_request, ["self", "request"]),
    (RequestQueue.pop_request, ["self"]),
    (RequestQueue.peek_request, ["self"]),
    (RequestQueue.prepend_request, ["self", "request"]),
    (RequestQueue.remove_requests, ["self", "requests"]),
    (KVCacheManager.prefix_cache_lookup_enabled, ["self", "request"]),
    (KVCacheCoordinator.find_longest_cache_hit, ["self", "block_hashes", "max_cache_hit_length"]),
    (BlockHashToBlockMap.get_one_block, ["self", "key"]),
    (make_block_hash_with_group_id, ["block_hash", "group_id"]),
    (FreeKVCacheBlockQueue.remove, ["self", "block"]),
    (FreeKVCacheBlockQueue.append_n, ["self", "blocks"]),
    (BlockPool._remove_cached_block_hashes, ["self", "block"]),
    (BlockPool.reset_prefix_cache, ["self"]),
    (
        BlockPool.cache_full_blocks,
        [
            *("self", "request", "blocks", "num_cached_blocks", "num_full_blocks"),
            *("block_size", "kv_cache_group_id", "block_mask"),
        ],
    ),
]

SCHEDULER_ATTRIBUTES = [
    "waiting",
    "skipped_waiting",
    "running",
    "policy",
    "pause_state",
    "max_num_running_reqs",
    "num_waiting_for_streaming_input",
    "cache_config.enable_prefix_caching",
    "kv_cache_manager.kv_cache_config.kv_cache_groups",
    "kv_cache_manager.coordinator.single_type_managers",
    "kv_cache_manager.coordinator.eagle_group_ids",
    "kv_cache_manager.block_pool.blocks",
    "kv_cache_manager.block_pool.num_gpu_blocks",
    "kv_cache_manager.block_pool.hash_block_size",
    "kv_cache_manager.block_pool.free_block_queue.num_free_blocks",
    "kv_cache_manager.block_pool.cached_block_hash_to_block",
]

REQUEST_ATTRIBUTES = [
    "request_id",
    "status",
    "arrival_time",
    "priority",
    "num_tokens",
    "num_prompt_tokens",
    "num_computed_tokens",
    "block_hashes",
]


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


@pytest.mark.parametrize("path", SCHEDULER_ATTRIBUTES)
def test_scheduler_has_this_attribute(stock: AsyncScheduler, path: str) -> None:
    found: Any = stock
    for name in path.split("."):
        assert hasattr(found, name)
        found = getattr(found, name)


@pytest.mark.parametrize("name", REQUEST_ATTRIBUTES)
def test_request_has_this_attribute(name: str) -> None:
    assert hasattr(make_request("r", [1, 2, 3], arrival_s=0.0), name)


def test_block_knows_its_id_its_users_and_its_hash(stock: AsyncScheduler) -> None:
    block = stock.kv_cache_manager.block_pool.blocks[3]
    assert block.block_id == 3
    assert block.ref_cnt == 0
    assert block.block_hash is None


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
    assert {"WAITING", "PREEMPTED", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"} <= set(RequestStatus.__members__)
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
