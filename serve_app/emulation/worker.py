"""`EmulatedGpuWorker`: vLLM complete, with the forward pass replaced by its duration.

Chosen by vLLM's own arguments, in `vllm serve` as under Ray:

    worker_cls="serve_app.emulation.worker.EmulatedGpuWorker"
    load_format="dummy"
    additional_config={"emulation": {...fields of serve_app.emulation.settings.EmulationSettings...}}

API server, tokeniser, scheduler, KV cache manager, KV events and metrics are vLLM's. No model is loaded and no KV
memory is allocated. The device is one queue: a step begins when it is submitted or when the one before it ends,
whichever is later, so that asynchronous scheduling overlaps host and device as on a real GPU. (vLLM's CPU platform
turns asynchronous scheduling off; on a CPU build it has to be switched on after the configuration was made.)

Faults (`serve_app.emulation.faults`) strike at given steps: a crash ends the engine by vLLM's own error path, a hang
holds results back, a slow-down lengthens steps. What it serves is labelled by `serve_app.emulation.label`.

Not emulated: log probabilities (none are returned) and grammars (a request for structured output ends with an error).
"""

import logging
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from serve_app.emulation.faults import CrashFault, delayed_s, fault_at
from serve_app.emulation.forward import Forward, ForwardModel
from serve_app.emulation.settings import EmulationSettings

# Below vLLM's own logger, so that the worker's process prints it in vLLM's format.
logger = logging.getLogger("vllm.fairway")


class EmulatedCrash(RuntimeError):
    """What a step raises, as torch would raise a CUDA error; every later step fails too."""


class EmulatedGpuWorker(WorkerBase):  # type: ignore[misc]  # vLLM is untyped here
    """One emulated GPU for one text model."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError on bad settings and on engine features that are not emulated."""
        self._settings = EmulationSettings.from_section(vllm_config.additional_config, "emulation")
        _refuse_unsupported(vllm_config, self._settings)
        super().__init__(vllm_config, *args, **kwargs)
        self._forward_model = ForwardModel(self._settings)
        self._pending: tuple[Forward, float] | None = None
        self._busy_until_s = 0.0
        self._num_steps = 0

    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        logger.warning("EMULATED GPU: no model runs, the text is pseudo-text; %s", self._settings)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Full attention in one layer: vLLM counts KV blocks the same for any number of layers."""
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            dtype=self.model_config.dtype,
        )
        return {"emulated": spec}

    def determine_available_memory(self) -> int:
        """Bytes, exactly `kv_blocks` blocks; vLLM itself then refuses a `max_model_len` that doesn't fit."""
        return int(self._settings.kv_blocks * self.get_kv_cache_spec()["emulated"].page_size_bytes)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Nothing to allocate."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Submit one step. None means that `sample_tokens` has its result; a step without tokens has none.

        Raises:
            EmulatedCrash: a crash was set at this step or before it.
        """
        forward = self._forward_model.run(scheduler_output)
        if not forward.req_ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._num_steps += 1
        self._busy_until_s = max(time.monotonic(), self._busy_until_s) + self._duration_s(forward)
        self._pending = forward, self._busy_until_s
        return None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """The submitted step's result, once the step is over; None when `execute_model` failed."""
        if self._pending is None:
            return None
        (forward, ready_at_s), self._pending = self._pending, None
        output = StepOutput(runner_output(forward), ready_at_s)
        return output if self.scheduler_config.async_scheduling else output.get_output()

    def _duration_s(self, forward: Forward) -> float:
        step, fault = self._num_steps, fault_at(self._settings.faults, self._num_steps)
        if fault is None:
            return forward.duration_s
        if fault.at_step == step:
            logger.error("EMULATED FAULT at engine step %d: %r", step, fault)
        if isinstance(fault, CrashFault):
            raise EmulatedCrash(f"CUDA error: unspecified launch failure (emulated: {fault!r}, now step {step})")
        return delayed_s(fault, forward.duration_s)

    def execute_dummy_batch(self) -> None:
        """Data-parallel engines keep step with each other; an emulated one has nobody to wait for."""


class StepOutput(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM is untyped here
    """A step's result that is there at `ready_at_s`, on the monotonic clock."""

    def __init__(self, output: ModelRunnerOutput, ready_at_s: float) -> None:
        self._output = output
        self._ready_at_s = ready_at_s

    def get_output(self) -> ModelRunnerOutput:
        """Sleeps until the step is over."""
        time.sleep(max(0.0, self._ready_at_s - time.monotonic()))
        return self._output


def _refuse_unsupported(vllm_config: VllmConfig, settings: EmulationSettings) -> None:
    unsupported = {
        "more than one GPU a replica": vllm_config.parallel_config.world_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "a model that does not generate text": vllm_config.model_config.runner_type != "generate",
    }
    asked_for = [feature for feature, wanted in unsupported.items() if wanted]
    if asked_for:
        raise ValueError(f"the emulated GPU does not emulate {', '.join(asked_for)}")
    vocabulary = vllm_config.model_config.get_vocab_size()
    if settings.text_first_id + settings.text_num_ids > vocabulary:
        raise ValueError(
            f'additional_config["emulation"]: text_first_id={settings.text_first_id} + '
            f"text_num_ids={settings.text_num_ids} is above the model's vocabulary of {vocabulary} tokens"
        )


def runner_output(forward: Forward) -> ModelRunnerOutput:
    """The step's result as vLLM's scheduler takes it."""
    return ModelRunnerOutput(
        req_ids=forward.req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(forward.req_ids)},
        sampled_token_ids=forward.sampled_token_ids,
    )
