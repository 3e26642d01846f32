"""Stock vLLM's scheduler and ours, each with what stands around it in an engine, for `schedule_cost.py`."""

import cProfile
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from serve_app.config import EnginePolicy
from serve_app.emulation.settings import EmulationSettings
from serve_app.policies.vllm_hooks import FairwayScheduler
from serve_app.sim.engine import EngineParams, engine_config

BLOCK_TOKENS = 16
POOL_BLOCKS = 65_536
PROMPT_TOKENS = 8_000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
OWN_BLOCKS = 32
"""Blocks that a hit has to compute."""
NUM_DOCUMENTS = 64
NUM_RUNNING = 64
STEP_TOKENS = 8_192
IN_FLIGHT = 2
HASH_BYTES = 32
TOKENS = [0] * PROMPT_TOKENS
"""Of every prompt: what is shared is told by the blocks' hashes alone."""


class InnerTimed(AsyncScheduler):  # type: ignore[misc]  # vLLM is untyped here
    """Stock vLLM, noting the CPU time of its own `schedule`."""

    inner_s = 0.0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        begun_s = time.thread_time()
        output = super().schedule(throttle_prefills)
        self.inner_s = time.thread_time() - begun_s
        return output


class OursTimed(FairwayScheduler, InnerTimed):
    """Ours, around the timed stock one: `super().schedule()` of ours finds it."""


class Prompts:
    """The block hashes of arrival number k: a function of the seed and k alone, so that both sides get the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = random.Random(seed)
        self._documents = [_hashes(rng, PROMPT_BLOCKS - OWN_BLOCKS) for _ in range(NUM_DOCUMENTS)]

    def hashes(self, number: int, document: int | None = None) -> list[bytes]:
        """Of a given document's continuation, else of a random one's or of a prompt that shares nothing."""
        rng = random.Random(f"{self._seed}-{number}")
        if document is None and rng.random() < 0.5:
            return _hashes(rng, PROMPT_BLOCKS)
        which = rng.randrange(NUM_DOCUMENTS) if document is None else document
        return self._documents[which] + _hashes(rng, OWN_BLOCKS)


@dataclass(slots=True)
class Times:
    """Of the measured steps, milliseconds each."""

    schedule_ms: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    num_admitted: int = 0


class Side:
    """One scheduler and what stands around it in an engine."""

    def __init__(self, scheduler_cls: type[InnerTimed], config: VllmConfig, prompts: Prompts) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=POOL_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        self.times = Times()
        self._prompts = prompts
        self._num_added = 0
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self.scheduler.skipped_waiting)

    def add(self, output_tokens: int, document: int | None = None) -> float:
        """The next arrival. Returns: CPU seconds of the scheduler's part."""
        request_id = f"r{self._num_added}"
        hashes = self._prompts.hashes(self._num_added, document)
        self._num_added += 1

        def new_hashes(request: Any) -> list[bytes]:
            known, full = len(request.block_hashes), request.num_tokens // BLOCK_TOKENS
            outputs = (f"{request_id}-{index}".encode().ljust(HASH_BYTES) for index in range(PROMPT_BLOCKS, full))
            return hashes[known:] if full == PROMPT_BLOCKS else list(outputs)[max(known - PROMPT_BLOCKS, 0) :]

        sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        request = Request(request_id, TOKENS, sampling, None, arrival_time=time.time(), block_hasher=new_hashes)
        begun_s = time.thread_time()
        self.scheduler.add_request(request)
        return time.thread_time() - begun_s

    def fill(self, waiting: int, output_tokens: int) -> float:
        """Add requests until `waiting` wait. Returns: CPU seconds of the scheduler's part."""
        return sum(self.add(output_tokens) for _ in range(waiting - self.num_waiting))

    def step(self, profiler: cProfile.Profile | None = None) -> float:
        """Schedule, and take in the answer of the step before. Returns: CPU seconds of both."""
        if profiler is not None:
            profiler.enable()
        begun_s = time.thread_time()
        output = self.scheduler.schedule()
        scheduled_s = time.thread_time() - begun_s
        if profiler is not None:
            profiler.disable()
        self.times.schedule_ms.append(scheduled_s * 1e3)
        self.times.added_ms.append((scheduled_s - self.scheduler.inner_s) * 1e3)
        self.times.num_admitted += len(output.scheduled_new_reqs)
        self._in_flight.append((output, self._answer(output)))
        if len(self._in_flight) < IN_FLIGHT:
            return scheduled_s
        oldest = self._in_flight.popleft()
        begun_s = time.thread_time()
        self.scheduler.update_from_output(*oldest)
        return scheduled_s + time.thread_time() - begun_s

    def _answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        chunks = [self.scheduler.requests[request_id].is_prefill_chunk for request_id in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[] if chunk else [1] for chunk in chunks],
        )


def scheduler_config(policy: EnginePolicy) -> VllmConfig:
    """vLLM's configuration of both, without KV events, and with asynchronous scheduling, as on a GPU."""
    device = EmulationSettings(kv_blocks=POOL_BLOCKS)
    config = engine_config(EngineParams(device, BLOCK_TOKENS, STEP_TOKENS, NUM_RUNNING), policy, kv_events=False)
    config.scheduler_config.async_scheduling = True
    return config


def _hashes(rng: random.Random, count: int) -> list[bytes]:
    drawn = rng.randbytes(HASH_BYTES * count)
    return [drawn[start : start + HASH_BYTES] for start in range(0, len(drawn), HASH_BYTES)]
