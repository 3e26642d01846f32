"""Scenarios of one replica's waiting queue.

One A6000 with Llama-3.1-8B (derived), steps of 2,048 tokens, a KV cache of 30 % of the reusable tokens.
"""

from dataclasses import replace

import numpy as np

from serve_app.emulation.step_time import prefill_time_s
from serve_app.sim.arrivals import Arrival, FloodParams, flood
from serve_app.sim.draws import draw_tokens
from serve_app.sim.grid import Built
from serve_app.sim.scenarios.sizing import Repeatable, completed_per_s, one_engine, sizes
from serve_app.sim.step_time import DEVICES
from serve_app.sim.workloads import (
    PHASES,
    AgentParams,
    DynamicParams,
    Family,
    Replayed,
    SteadyParams,
    agent,
    dynamic,
    steady,
)

DEVICE = "a6000"
CACHE_SHARE = 0.3
"""KV cache over reusable tokens: between the published 1/4 and 1/3."""
LOADS = {"calm": 0.6, "burst": 0.95, "spike": 1.4}
"""Request rates over capacity; the published rates are not public."""


AGENTS_START_S = 60.0
"""Before it most sessions are at their first, short prompts."""


def build_dynamic(family: Family, seed: int, output_tokens: int = 1) -> Built:
    """Calm, burst and spike of one family."""
    repeatable = Repeatable(family, seed)
    size = sizes(repeatable, DEVICE, CACHE_SHARE, output_tokens, mixes=PHASES)
    calm, burst, spike = (LOADS[phase] * size.capacity_per_s[phase] for phase in PHASES)
    params = DynamicParams(repeatable, (calm, burst, spike), output_tokens=output_tokens)
    return Built(dynamic(params, np.random.default_rng(seed)), one_engine(DEVICE, size.kv_tokens))


def build_steady(family: Family, load: float, seed: int, duration_s: float = 300.0) -> Built:
    """One family at one rate, relative to capacity."""
    repeatable = Repeatable(family, seed)
    size = sizes(repeatable, DEVICE, CACHE_SHARE)
    params = SteadyParams(repeatable, load * size.capacity_per_s["calm"], duration_s)
    return Built(steady(params, np.random.default_rng(seed)), one_engine(DEVICE, size.kv_tokens))


def build_flood(miss_tokens: int, rate: float, start: float, seed: int) -> Built:
    """20 misses, then hits at `rate` of what the engine completes of them, after `start` of the backlog's time."""
    cluster = one_engine(DEVICE)
    params = FloodParams(miss_tokens=miss_tokens, rate_per_s=20.0, num_misses=1)
    hits = [one for one in flood(params, np.random.default_rng(seed)) if one.phase == "hit"]
    backlog_s = FloodParams().num_misses * prefill_time_s(DEVICES[DEVICE], miss_tokens, cluster.engine.max_step_tokens)
    chosen = FloodParams(
        miss_tokens=miss_tokens, rate_per_s=rate * completed_per_s(hits, cluster), start_s=start * backlog_s
    )
    return Built(flood(chosen, np.random.default_rng(seed)), cluster)


LONG_PROMPT_TOKENS, SHORTS_PER_S = 100_000, 10.0


def build_long_prefill(step_tokens: int, short_tokens: int, seed: int) -> Built:
    """One prompt of 100,000 tokens, and a short one every 100 ms until it would be done alone."""
    rng = np.random.default_rng(seed)
    cluster = one_engine(DEVICE)
    cluster = replace(cluster, engine=replace(cluster.engine, max_step_tokens=step_tokens))
    alone_s = prefill_time_s(DEVICES[DEVICE], LONG_PROMPT_TOKENS, step_tokens)
    shorts = [
        Arrival((n + 1) / SHORTS_PER_S, f"short-{n}", draw_tokens(short_tokens, rng), 1, "short")
        for n in range(int(alone_s * SHORTS_PER_S))
    ]
    return Built([Arrival(0.0, "long", draw_tokens(LONG_PROMPT_TOKENS, rng), 1, "long"), *shorts], cluster)


def build_agents(load: float, seed: int) -> Built:
    """Agents' sessions at one rate, relative to capacity; their own gaps and outputs are left out."""
    sessions = agent(AgentParams(sessions_per_s=2.0, duration_s=900.0), np.random.default_rng(seed))
    family = Replayed([one.prompt for one in sessions if one.at_s >= AGENTS_START_S])
    size = sizes(family, DEVICE, CACHE_SHARE)
    params = SteadyParams(family, load * size.capacity_per_s["calm"], 300.0)
    return Built(steady(params, np.random.default_rng(seed)), one_engine(DEVICE, size.kv_tokens))
