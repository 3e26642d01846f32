"""Step-time models by device name, for simulated engines: measured, derived or assumed, and each says which.

The formula is `serve_app.emulation.step_time`'s, shared with the emulated GPU, its wall-clock twin. What is derived
comes from a data sheet and the model's shape alone, by

    seconds a token   = 2 * parameters that every token multiplies / (efficiency * peak FLOP/s)
    seconds a pair    = 4 * layers * hidden size / (attention efficiency * peak FLOP/s)
    seconds a context token = bytes of its keys and values / memory bytes/s
    base seconds      = bytes of the weights / memory bytes/s + host overhead

so a decode step pays for reading the weights and the cache, and a prefill step for its arithmetic. (A real step
overlaps the two; the sum is at most the base, 6 to 9 % of a full prefill step, too slow.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.emulation.settings import EmulationSettings

LINEAR_EFFICIENCY, ATTENTION_EFFICIENCY = 0.55, 0.40
"""Shares of the peak that prefill reaches: assumed, in the middle of what serving engines report."""
HOST_OVERHEAD_S = 0.002
"""Scheduling, launch and sampling of one step: assumed."""
MEMORY_SHARE = 0.9
"""Share of the memory that the engine may use (`gpu_memory_utilization`)."""
ACTIVATION_BYTES = 2e9
"""Left for activations: assumed."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a step-time model needs to know of a model with 16-bit weights."""

    parameters: float
    """All of them; every one is read in every step."""
    multiplied_parameters: float
    """Those that each prompt token multiplies: without embeddings and the output layer."""
    layers: int
    hidden_size: int
    kv_bytes_per_token: int
    """Keys and values of one token, all layers."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """A GPU's published peak figures."""

    flops: float
    """Dense 16-bit tensor FLOP/s."""
    memory_bytes_per_s: float
    memory_bytes: float


LLAMA_3_1_8B = ModelShape(
    parameters=8.03e9,
    multiplied_parameters=6.98e9,
    layers=32,
    hidden_size=4_096,
    kv_bytes_per_token=131_072,
)
"""Its published configuration: 32 layers, 8 of 32 heads for keys and values, 128 wide, vocabulary 128,256."""

DATA_SHEETS: Mapping[str, DataSheet] = {
    "a6000": DataSheet(154.8e12, 768e9, 48e9),
    "l40": DataSheet(181.05e12, 864e9, 48e9),
    "h200": DataSheet(989e12, 4.8e12, 141e9),
}
"""NVIDIA's data sheets of RTX A6000, L40 and H200 SXM, without sparsity."""


def derived(sheet: DataSheet, model: ModelShape, block_size_tokens: int = 16) -> EmulationSettings:
    """The step-time model that a data sheet and a model's shape imply, with the KV blocks that fit beside the weights.

    Raises:
        ValueError: the weights leave no room for two KV blocks.
    """
    weight_bytes = 2 * model.parameters
    kv_bytes = MEMORY_SHARE * sheet.memory_bytes - weight_bytes - ACTIVATION_BYTES
    kv_blocks = int(kv_bytes / (model.kv_bytes_per_token * block_size_tokens))
    if kv_blocks < 2:
        raise ValueError(f"memory_bytes is {sheet.memory_bytes:g}; {weight_bytes:g} bytes of weights leave no KV cache")
    return EmulationSettings(
        step_base_s=weight_bytes / sheet.memory_bytes_per_s + HOST_OVERHEAD_S,
        s_per_token=2 * model.multiplied_parameters / (LINEAR_EFFICIENCY * sheet.flops),
        s_per_token_context=4 * model.layers * model.hidden_size / (ATTENTION_EFFICIENCY * sheet.flops),
        s_per_context_token=model.kv_bytes_per_token / sheet.memory_bytes_per_s,
        kv_blocks=kv_blocks,
    )


def fitted(
    prompt_tokens: Sequence[int], seconds: Sequence[float], max_step_tokens: int, kv_blocks: int
) -> EmulationSettings:
    """The step-time model nearest to measured cold prefill seconds, by least squares of the relative errors.

    prompt_tokens: (n,), lengths, at least 1. seconds: (n,), above 0. No term becomes negative: the worst offender is
    left out and the rest fitted again. The attention term is fitted for pairs alone.

    Raises:
        ValueError: fewer than three measurements.
    """
    if len(prompt_tokens) < 3:
        raise ValueError(f"{len(prompt_tokens)} measurements were given; a fit of three terms needs at least 3")
    tokens, measured_s = np.array(prompt_tokens, dtype=float), np.array(seconds, dtype=float)
    num_steps, pairs = np.ceil(tokens / max_step_tokens), tokens * (tokens + 1) / 2
    terms = np.stack([num_steps, tokens, pairs], axis=1) / measured_s[:, None]
    kept, found = [0, 1, 2], np.zeros(3)
    while True:
        found[:] = 0.0
        found[kept] = np.linalg.lstsq(terms[:, kept], np.ones(len(tokens)), rcond=None)[0]
        if not np.any(found < 0):
            break
        kept.remove(int(np.argmin(found)))
    base_s, s_per_token, s_per_pair = found.tolist()
    return EmulationSettings(
        step_base_s=base_s, s_per_token=s_per_token, s_per_token_context=s_per_pair, kv_blocks=kv_blocks
    )


CPU_SMOLLM2 = fitted(
    prompt_tokens=(64, 256, 512, 1_024, 2_048, 4_000, 6_144),
    seconds=(0.153962, 0.47549, 0.995539, 2.168775, 4.94798, 12.511028, 24.140614),
    max_step_tokens=2_048,
    kv_blocks=1_456,
)
"""SmolLM2-135M, float16: fitted to `configs/profiles/cpu-smollm2-135m.json`, which says where it was measured."""

DEVICES: Mapping[str, EmulationSettings] = {
    "emulated": EmulationSettings(),
    **{name: derived(sheet, LLAMA_3_1_8B) for name, sheet in DATA_SHEETS.items()},
    "cpu-smollm2": CPU_SMOLLM2,
}
"""`emulated`: 5 ms a step and 0.1 ms a token, 1,152 KV blocks, no attention term; a round-numbered stand-in for one GPU
with an 8B model, not a measurement. `a6000`, `l40`, `h200`: derived, with Llama-3.1-8B. `cpu-smollm2`: measured."""
