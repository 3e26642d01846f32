"""A simulated engine's insides: vLLM's configuration, made by vLLM, and its real scheduler on the virtual clock."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from serve_app.config import EnginePolicy
from serve_app.emulation.settings import EmulationSettings
from serve_app.policies.vllm_hooks import FairwayScheduler
from serve_app.router.kv_event_batch import KvEvent, decode_batch
from serve_app.sim.clock import VirtualClock

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 128_256,
    "max_position_embeddings": 1_048_576,
    "torch_dtype": "bfloat16",
}
"""A model that is only its configuration: a scheduler reads lengths and layer kinds of it, nothing else."""


@dataclass(frozen=True, slots=True)
class EngineParams:
    """One engine, as vLLM's arguments would describe it."""

    device: EmulationSettings
    """Step times and the number of KV blocks."""
    block_size_tokens: int = 16
    """Tokens a KV block."""
    max_step_tokens: int = 2_048
    """Token budget of a step (`max_num_batched_tokens`)."""
    max_running: int = 256
    """Requests that may run at once (`max_num_seqs`)."""

    def __post_init__(self) -> None:
        """Raises ValueError on injected faults, which a simulated device does not have."""
        if self.device.faults:
            raise ValueError(
                f"device.faults is {self.device.faults}; a simulated cluster's faults are `Cluster.faults`"
            )


def engine_config(params: EngineParams, policy: EnginePolicy, kv_events: bool = True) -> VllmConfig:
    """vLLM's configuration, made by vLLM; the policy enters where it does in production."""
    with tempfile.TemporaryDirectory(prefix="fairway-sim-") as directory:
        Path(directory, "config.json").write_text(json.dumps(_MODEL))
        args = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=params.block_size_tokens,
            max_model_len=(params.device.kv_blocks - 1) * params.block_size_tokens,
            max_num_batched_tokens=params.max_step_tokens,
            max_num_seqs=params.max_running,
            enable_prefix_caching=True,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=kv_events, publisher="null"),
            additional_config={"fairway": policy.model_dump(mode="json")},
        )
        config = args.create_engine_config()
    config.cache_config.num_gpu_blocks = params.device.kv_blocks
    return config


class SimulatedScheduler(FairwayScheduler):
    """The production scheduler on the virtual clock."""

    def __init__(self, clock: VirtualClock, config: VllmConfig) -> None:
        self._clock = clock
        block_size: int = config.cache_config.block_size
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        super().__init__(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=config.cache_config.num_gpu_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["simulated"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
        )

    def _now_s(self) -> float:
        return self._clock.now_s


class KvEventTap:
    """In the place of vLLM's publisher: hands each batch over in its wire format, decoded as the router decodes it."""

    def __init__(self, deliver: Callable[[list[KvEvent]], None]) -> None:
        self._deliver = deliver
        self._encoder = msgspec.msgpack.Encoder()

    def publish(self, batch: Any) -> None:
        self._deliver(decode_batch(self._encoder.encode(batch)))
