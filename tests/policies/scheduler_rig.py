"""vLLM's real scheduler without a model: its configuration, its requests and what a model runner would answer.

Not a test. `Engine` drives a scheduler as vLLM's engine core does, one or two steps in flight, on a virtual clock.
"""

import json
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from serve_app.policies.vllm_hooks import FairwayScheduler

BLOCK_SIZE = 16
VOCABULARY = 1_000
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16_384,
}

init_none_hash(sha256)
block_hasher = get_request_block_hasher(BLOCK_SIZE, sha256)


class ClockedScheduler(FairwayScheduler):
    """Virtual time; what is known of the waiting requests, and each order of them, checked as it is made."""

    now_s = 0.0
    num_orders = 0

    def _now_s(self) -> float:
        return self.now_s

    def _sync(self) -> None:
        super()._sync()
        self._requests.check_integrity(self.waiting)
        table = self._requests.table
        rows = table.waiting_rows().tolist()
        assert table.all_tokens[rows].tolist() == [table.requests[row].num_tokens for row in rows]
        assert table.hit_tokens[rows].tolist() == [self.fresh_hit_tokens(table.requests[row]) for row in rows]

    def fresh_hit_tokens(self, request: Request) -> int:
        """By vLLM's own look-up."""
        if request.num_computed_tokens:
            return int(request.num_computed_tokens)
        if not self.kv_cache_manager.prefix_cache_lookup_enabled(request):
            return 0
        coordinator = self.kv_cache_manager.coordinator
        return int(coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])

    def _reorder_waiting(self) -> bool:
        before = {request.request_id for request in self.waiting}
        front_fits = super()._reorder_waiting()
        after = [request.request_id for request in self.waiting]
        assert len(after) == len(before)
        assert set(after) == before
        assert not any(
            request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for request in self.skipped_waiting
        )
        self.num_orders += len(after) > 1
        return front_fits


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def full_attention() -> KVCacheSpec:
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)


def make_scheduler(
    directory: Path,
    scheduler_cls: type[AsyncScheduler],
    fairway: dict[str, Any] | None = None,
    *,
    num_blocks: int = 80,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 128,
    max_model_len: int = 1_024,
    policy: str = "fcfs",
    prefix_caching: bool = True,
    specs: list[KVCacheSpec] | None = None,
    lora_config: LoRAConfig | None = None,
    kv_transfer_config: KVTransferConfig | None = None,
) -> AsyncScheduler:
    """A scheduler as vLLM's engine core constructs it; `directory` takes the model's config.json."""
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            policy=policy,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix_caching),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        additional_config={} if fairway is None else {"fairway": fairway},
        lora_config=lora_config,
        kv_transfer_config=kv_transfer_config,
    )
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs or [full_attention()])]
    return scheduler_cls(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    arrival_s: float,
    max_tokens: int = 4,
    priority: int = 0,
    skip_reading_prefix_cache: bool | None = None,
) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, skip_reading_prefix_cache=skip_reading_prefix_cache
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=arrival_s,
        priority=priority,
        block_hasher=block_hasher,
    )


class EventLog:
    """Stands where vLLM's event publisher stands, and knows which block hashes a subscriber believes to be cached."""

    def __init__(self) -> None:
        self.believed: Counter[bytes | int] = Counter()

    def publish(self, batch: KVEventBatch) -> None:
        self.believed = self.believed_after(batch.events)

    def believed_after(self, events: list[KVCacheEvent]) -> Counter[bytes | int]:
        believed = self.believed.copy()
        for event in events:
            if isinstance(event, BlockStored):
                believed.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                believed.subtract(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                believed.clear()
        return believed


class Engine:
    """Steps a scheduler; up to `max_in_flight` scheduled steps await the model (vLLM runs two ahead)."""

    def __init__(self, scheduler: AsyncScheduler, max_in_flight: int = 1, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.events = EventLog()
        scheduler.kv_event_publisher = self.events
        self.max_in_flight = max_in_flight
        self.rng = random.Random(seed)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.started: list[str] = []
        self.trace: list[dict[str, int]] = []
        self.finished: set[str] = set()
        self.num_preemptions = 0
        self.uncached_by_id: set[int] = set()
        """Blocks that `evict_blocks` took the hash of while they were in use, perhaps by several requests."""

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.started += [new.req_id for new in output.scheduled_new_reqs]
        self.trace.append(dict(output.num_scheduled_tokens))
        self.num_preemptions += len(output.preempted_req_ids or ())
        self.in_flight.append((output, self._model_answer(output)))
        while len(self.in_flight) >= self.max_in_flight or (self.in_flight and not output.num_scheduled_tokens):
            self._process_oldest_step()
        return output

    def run_until_idle(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        while self.in_flight:
            self._process_oldest_step()
        assert not self.scheduler.has_unfinished_requests()

    def _model_answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One token for every request that is past its prefill after this step; an unfinished chunk samples nothing."""
        ids = list(output.num_scheduled_tokens)
        prefilling = [self.scheduler.requests[req_id].is_prefill_chunk for req_id in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
            sampled_token_ids=[[] if chunk else [self.rng.randrange(VOCABULARY)] for chunk in prefilling],
        )

    def _process_oldest_step(self) -> None:
        for outputs in self.scheduler.update_from_output(*self.in_flight.popleft()).values():
            self.finished |= {output.request_id for output in outputs.outputs if output.finish_reason is not None}


def check_scheduler(engine: Engine, alive: set[str]) -> None:
    """Assert that no request and no block was lost or is held twice. `alive`: what was added and not ended."""
    scheduler = engine.scheduler
    queues = [*scheduler.waiting, *scheduler.skipped_waiting, *scheduler.running]
    assert len(queues) == len({request.request_id for request in queues})
    assert {request.request_id for request in queues} == alive == set(scheduler.requests)
    assert all(request.status == RequestStatus.RUNNING for request in scheduler.running)
    _check_blocks(engine)


def _check_blocks(engine: Engine) -> None:
    pool = engine.scheduler.kv_cache_manager.block_pool
    [manager] = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    owners: Counter[int] = Counter()
    for blocks in manager.req_to_blocks.values():
        ids = [block.block_id for block in blocks]
        assert len(ids) == len(set(ids))
        owners.update(ids)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert len(free) == len(set(free)) == pool.free_block_queue.num_free_blocks
    assert set(free) | set(owners) == {block.block_id for block in pool.blocks if not block.is_null}
    for block in pool.blocks[1:]:
        assert block.ref_cnt == owners[block.block_id]
        assert (block.block_id in owners) != (block.block_id in free)
        # Two requests hold one block only where they share its content.
        if owners[block.block_id] > 1:
            assert block.block_hash is not None or block.block_id in engine.uncached_by_id
    hashes = [block.block_hash for block in pool.blocks if block.block_hash is not None]
    cached = Counter(maybe_convert_block_hash(get_block_hash(block_hash)) for block_hash in hashes)
    assert +engine.events.believed_after(pool.kv_event_queue) == cached
