"""How long one engine step takes on the emulated GPU.

    step seconds = time_scale * (base + s_per_token * tokens + s_per_token_context * pairs
                                 + s_per_context_token * context)

over the chunks of the step, prefill and decode alike: a chunk of n tokens with c tokens before it has n tokens,
n * c + n * (n + 1) / 2 pairs of a token and a token that it attends to, and c tokens of context to read from the KV
cache. A step without tokens takes no time.
Source: the house experiments, "Step-time model". Cost: O(chunks).
"""

from collections.abc import Iterable

from serve_app.config import PrefillTable
from serve_app.emulation.settings import EmulationSettings

Chunk = tuple[int, int]
"""Tokens that a request computes in the step, and tokens of it that are in the KV cache before the step."""


def step_time_s(settings: EmulationSettings, chunks: Iterable[Chunk]) -> float:
    """Seconds that a step of these chunks takes.

    Raises:
        ValueError: a chunk has less than one token, or a negative context.
    """
    tokens, pairs, context = 0, 0, 0
    for num_tokens, num_context in chunks:
        if num_tokens < 1 or num_context < 0:
            raise ValueError(f"chunk {(num_tokens, num_context)} must have at least 1 token and no negative context")
        tokens += num_tokens
        pairs += num_tokens * num_context + num_tokens * (num_tokens + 1) // 2
        context += num_context
    if not tokens:
        return 0.0
    attention_s = settings.s_per_token_context * pairs + settings.s_per_context_token * context
    return settings.time_scale * (settings.step_base_s + settings.s_per_token * tokens + attention_s)


def prefill_time_s(settings: EmulationSettings, prompt_tokens: int, max_step_tokens: int) -> float:
    """Seconds to prefill a cold prompt alone, in chunks of at most `max_step_tokens`."""
    starts = range(0, prompt_tokens, max_step_tokens)
    return sum(step_time_s(settings, [(min(max_step_tokens, prompt_tokens - start), start)]) for start in starts)


def prefill_table(settings: EmulationSettings, max_step_tokens: int, max_prompt_tokens: int) -> PrefillTable:
    """What a measurement of the emulated engine would give: cold prefill seconds at powers of two and at the longest.

    Raises:
        ValueError: max_prompt_tokens is below 2.
    """
    powers = [2**exponent for exponent in range(max_prompt_tokens.bit_length()) if 2**exponent < max_prompt_tokens]
    tokens = (*powers, max_prompt_tokens)
    return PrefillTable(
        device="emulated GPU",
        model="any",
        dtype="any",
        vllm_version="0.29.0",
        date="",
        derived=f"step-time model {settings.model_dump_json()}, {max_step_tokens} tokens a step",
        tokens=tokens,
        seconds=tuple(prefill_time_s(settings, count, max_step_tokens) for count in tokens),
        base_s=prefill_time_s(settings, 1, max_step_tokens),
        hit_s_per_token=settings.time_scale * settings.s_per_context_token,
    )
