"""The two engines that the simulator is held against, a client for them, and what is measured of them beforehand.

Both are vLLM complete, without its HTTP server: `AsyncLLM`, engine and worker in processes of their own, no
asynchronous scheduling (which vLLM turns off on CPUs). Prompts are token ids, so nothing is tokenised. TTFT and latency
are the client's, from the planned time of arrival on.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from validation_trace import TraceParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.config import EnginePolicy
from serve_app.emulation.settings import EmulationSettings
from serve_app.emulation.step_time import step_time_s
from serve_app.sim.arrivals import Arrival
from serve_app.sim.columns import Served
from serve_app.sim.draws import draw_tokens
from serve_app.sim.engine import EngineParams
from serve_app.sim.step_time import DEVICES, fitted

EMULATED_WORKER = "serve_app.emulation.worker.EmulatedGpuWorker"
SCHEDULER = "serve_app.policies.vllm_hooks.FairwayScheduler"
MODEL = Path("~/.cache/fairway-serve/smollm2-135m-instruct")
MAX_MODEL_TOKENS = 8_192
"""SmolLM2's positions."""
CPU_DTYPE = "float32"
"""Half precision has no instructions of its own on many CPUs."""
MAX_RUNNING = 64
LEAD_S = 0.5
"""From the start of a replay to its time 0: all requests are made ready in it."""
PROBE_REPEATS = 5


class EngineError(RuntimeError):
    """An engine that cannot be had or cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine and its trace."""

    params: EngineParams
    """What engine and simulator have in common; the device is the simulator's before anything is measured."""
    trace: TraceParams
    make_config: Callable[[EngineParams, EnginePolicy], VllmConfig]
    measure: Callable[[AsyncLLM, EngineParams], Any]
    """Coroutine function: the device as measured on a running engine."""
    tolerance: float
    """Largest relative difference of the median TTFT that counts as valid."""


@asynccontextmanager
async def running(config: VllmConfig) -> AsyncIterator[AsyncLLM]:
    """An engine of its own from vLLM's configuration, stopped at the end."""
    engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    try:
        yield engine
    finally:
        engine.shutdown()


async def replay(engine: AsyncLLM, arrivals: Sequence[Arrival]) -> tuple[list[Served], float]:
    """Serve all arrivals at their times from an empty prefix cache; also seconds by which the latest was sent late.

    Raises:
        EngineError: the engine still holds KV blocks of earlier requests.
    """
    if not await engine.reset_prefix_cache():
        raise EngineError("the prefix cache could not be emptied; requests are still running")
    begun_s = time.perf_counter() + LEAD_S
    answers = await asyncio.gather(*(_ask(engine, arrival, begun_s + arrival.at_s) for arrival in arrivals))
    return [served for served, _ in answers], max(late_s for _, late_s in answers)


async def _ask(engine: AsyncLLM, arrival: Arrival, planned_s: float) -> tuple[Served, float]:
    prompt: Any = {"prompt_token_ids": arrival.prompt.tolist()}
    sampling = SamplingParams(
        max_tokens=arrival.output_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    await asyncio.sleep(planned_s - time.perf_counter())
    late_s = time.perf_counter() - planned_s
    first_s, cached_tokens = None, 0
    async for output in engine.generate(prompt, sampling, arrival.request_id):
        if first_s is None:
            first_s, cached_tokens = time.perf_counter(), output.num_cached_tokens or 0
    assert first_s is not None
    served = Served(
        request_id=arrival.request_id,
        replica_id="replica-0",
        phase=arrival.phase,
        arrival_s=arrival.at_s,
        ttft_s=first_s - planned_s,
        latency_s=time.perf_counter() - planned_s,
        prompt_tokens=len(arrival.prompt),
        cached_tokens=cached_tokens,
        output_tokens=arrival.output_tokens,
    )
    return served, late_s


async def lone(engine: AsyncLLM, num_tokens: int, output_tokens: int, seed: int) -> Served:
    """One cold request alone on the engine."""
    prompt = draw_tokens(num_tokens, np.random.default_rng(seed))
    arrival = Arrival(0.0, f"lone-{num_tokens}-{seed}", prompt, output_tokens, "lone")
    served, _ = await replay(engine, [arrival])
    return served[0]


async def emulated_device(engine: AsyncLLM, params: EngineParams) -> EmulationSettings:
    """The emulated GPU's own settings, and on each step what the host adds to one, measured by decoding alone."""
    device, prompt_tokens, output_tokens = params.device, params.block_size_tokens, 65
    extra_s = []
    for seed in range(PROBE_REPEATS):
        served = await lone(engine, prompt_tokens, output_tokens, seed)
        step_s = (served.latency_s - served.ttft_s) / (output_tokens - 1)
        extra_s.append(step_s - step_time_s(device, [(1, prompt_tokens + output_tokens // 2)]))
    host_s = max(0.0, statistics.median(extra_s))
    return device.model_copy(update={"step_base_s": device.step_base_s + host_s / device.time_scale})


CPU_PROBE_TOKENS = (1, 32, 64, 128, 256, 512)
"""A step that prefills one token does what a step that decodes one does."""
CPU_DECODE_CONTEXTS, CPU_DECODE_STEPS = (32, 1_024), 33
"""Prompts whose decode steps, alone, tell what a step costs and what reading its context adds."""


async def decode_step_s(engine: AsyncLLM, context_tokens: int) -> float:
    """Seconds of a step that decodes one token behind a context of so many, alone; median of the repeats."""
    steps_s = []
    for seed in range(PROBE_REPEATS):
        served = await lone(engine, context_tokens, CPU_DECODE_STEPS, seed)
        steps_s.append((served.latency_s - served.ttft_s) / (CPU_DECODE_STEPS - 1))
    return statistics.median(steps_s)


async def cpu_device(engine: AsyncLLM, params: EngineParams) -> EmulationSettings:
    """The step-time model of this engine, from requests alone on it.

    Cold prefills give what a step, a token and a pair cost, as `fairway-serve profile` measures them, less the way
    between client and engine: what the first token of a one-token prompt takes beyond a decode step, which does the
    same work and waits for no client. Decode steps behind a short and a long context give what reading it costs.
    """
    await lone(engine, CPU_PROBE_TOKENS[0], 1, PROBE_REPEATS)  # the first step of an engine is slow
    # Every length once, then again, so that a disturbance does not hit all runs of one.
    rounds = [
        [(await lone(engine, tokens, 1, seed)).ttft_s for tokens in CPU_PROBE_TOKENS] for seed in range(PROBE_REPEATS)
    ]
    seconds = [statistics.median(one_length) for one_length in zip(*rounds, strict=True)]
    short_s, long_s = [await decode_step_s(engine, context) for context in CPU_DECODE_CONTEXTS]
    path_s = max(0.0, seconds[0] - short_s)
    device = fitted(
        CPU_PROBE_TOKENS, [one_s - path_s for one_s in seconds], params.max_step_tokens, params.device.kv_blocks
    )
    read_s = (long_s - short_s) / (CPU_DECODE_CONTEXTS[1] - CPU_DECODE_CONTEXTS[0]) - device.s_per_token_context
    return device.model_copy(update={"s_per_context_token": max(0.0, read_s)})


def emulated_config(params: EngineParams, policy: EnginePolicy) -> VllmConfig:
    """The emulated GPU; of the model only its configuration is read."""
    emulation = params.device.model_dump(mode="json")
    return _config(params, policy, {"emulation": emulation}, worker_cls=EMULATED_WORKER, load_format="dummy")


def cpu_config(params: EngineParams, policy: EnginePolicy) -> VllmConfig:
    """SmolLM2 on one core."""
    return _config(params, policy, {}, num_gpu_blocks_override=params.device.kv_blocks, dtype=CPU_DTYPE)


def _config(params: EngineParams, policy: EnginePolicy, sections: Mapping[str, Any], **engine_args: Any) -> VllmConfig:
    """vLLM's configuration, made by vLLM.

    Raises:
        EngineError: the model is not there.
    """
    model = MODEL.expanduser()
    if not model.is_dir():
        raise EngineError(f"there is no {model}; run `fairway-serve prepare-model` once")
    args = AsyncEngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=params.block_size_tokens,
        max_model_len=min(MAX_MODEL_TOKENS, (params.device.kv_blocks - 1) * params.block_size_tokens),
        max_num_batched_tokens=params.max_step_tokens,
        max_num_seqs=params.max_running,
        enable_prefix_caching=True,
        scheduler_cls=SCHEDULER,
        additional_config={"fairway": policy.model_dump(mode="json"), **sections},
        **engine_args,
    )
    return args.create_engine_config()


SETUPS: Mapping[str, Setup] = {
    "emulated": Setup(
        params=EngineParams(DEVICES["emulated"], block_size_tokens=16, max_step_tokens=2_048, max_running=MAX_RUNNING),
        trace=TraceParams(
            num_requests=120,
            num_documents=10,
            document_tokens=(1_024, 4_096),
            question_tokens=(32, 256),
            miss_tokens=(512, 4_096),
        ),
        make_config=emulated_config,
        measure=emulated_device,
        tolerance=0.10,
    ),
    "cpu": Setup(
        params=EngineParams(
            DEVICES["cpu-smollm2"].model_copy(update={"kv_blocks": 80}),
            block_size_tokens=32,
            max_step_tokens=256,
            max_running=MAX_RUNNING,
        ),
        trace=TraceParams(
            num_requests=48,
            num_documents=8,
            document_tokens=(128, 512),
            question_tokens=(8, 32),
            miss_tokens=(64, 384),
        ),
        make_config=cpu_config,
        measure=cpu_device,
        tolerance=0.20,
    ),
}
