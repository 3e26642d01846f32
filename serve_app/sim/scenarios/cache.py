"""Scenarios of one replica's KV cache: one L40 with Llama-3.1-8B (derived), a full queue from the start."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serve_app.sim.arrivals import Arrival, GspOrder, GspParams, at_once, gsp
from serve_app.sim.grid import Built
from serve_app.sim.scenarios.sizing import cache_tokens, one_engine
from serve_app.sim.traces import CodingParams, TraceParams, read_coding_sessions, read_mooncake
from serve_app.sim.workloads import FAMILIES, SaturatedParams, saturated

DEVICE = "l40"
GROUPS, ROUNDS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 16, 2_048, 4
REQUESTS = 1_000
"""Of the scenarios that are not GSP."""


def build_rounds(order: GspOrder, shared_share: float, round_share: float, seed: int) -> Built:
    """All prompts waiting from the start, in this order, on a cache of this share of a round.

    A round is what one request of every group takes.
    """
    params = GspParams(GROUPS, ROUNDS, (PROMPT_TOKENS,), shared_share, OUTPUT_TOKENS, order=order)
    arrivals = at_once(gsp(params, np.random.default_rng(seed)))
    one_round_tokens = GROUPS * (PROMPT_TOKENS + OUTPUT_TOKENS)
    return Built(arrivals, one_engine(DEVICE, round(round_share * one_round_tokens)))


def build_recency(cache_share: float, seed: int) -> Built:
    """A sliding working set."""
    params = SaturatedParams(FAMILIES["recency"], REQUESTS, OUTPUT_TOKENS)
    return _sized(saturated(params, np.random.default_rng(seed)), cache_share)


def build_conversation(path: Path, cache_share: float, seed: int) -> Built:
    """Mooncake's conversations; a trace of its own minutes for each seed."""
    params = TraceParams(
        start_s=600.0 * seed, max_requests=REQUESTS, max_prompt_tokens=32_000, output_tokens=OUTPUT_TOKENS
    )
    return _sized(at_once(read_mooncake(path, params, np.random.default_rng(seed)).arrivals), cache_share)


def build_coding(path: Path, cache_share: float, seed: int) -> Built:
    """Sessions of coding agents side by side, gaps of at most two minutes."""
    params = TraceParams(max_requests=REQUESTS, output_tokens=OUTPUT_TOKENS)
    coding = CodingParams(sessions_per_s=0.05, max_session_tokens=64_000, max_gap_s=120.0)
    trace = read_coding_sessions(path, params, coding, np.random.default_rng(seed))
    return _sized(at_once(trace.arrivals), cache_share)


def _sized(arrivals: Sequence[Arrival], cache_share: float) -> Built:
    return Built(arrivals, one_engine(DEVICE, cache_tokens(arrivals, cache_share)))
