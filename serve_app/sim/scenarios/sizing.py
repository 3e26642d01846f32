"""How a scenario is sized: its cache relative to the tokens that are worth keeping, its rate relative to capacity.

Capacity is the rate that FCFS and LRU complete with a full queue and a warm cache ("FCFS just keeps up"). Both are
measured on the scenario's own prompts before it is built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from serve_app.sim.arrivals import Arrival, at_once
from serve_app.sim.chosen import BASELINE
from serve_app.sim.draws import TokenArray
from serve_app.sim.engine import EngineParams
from serve_app.sim.run import Cluster, Simulation
from serve_app.sim.step_time import DEVICES
from serve_app.sim.workloads import Family, SaturatedParams, reusable_tokens, saturated

BLOCK_SIZE_TOKENS = 32
"""Twice vLLM's default on GPUs: a run's time is block keeping, and this halves it."""
SIZING_REQUESTS, WARM_SHARE = 400, 1 / 3
"""Requests that measure capacity, and the share of them that only warms the cache."""
DEVICE_BLOCK_TOKENS = 16
"""What the device models count their KV blocks in."""


def engine(device: str, kv_tokens: int | None = None, block_size_tokens: int = BLOCK_SIZE_TOKENS) -> EngineParams:
    """An engine of this device with a cache of so many tokens; None: what fits beside the weights."""
    settings = DEVICES[device]
    tokens = kv_tokens if kv_tokens is not None else settings.kv_blocks * DEVICE_BLOCK_TOKENS
    # One block more, as vLLM keeps one for itself.
    resized = settings.model_copy(update={"kv_blocks": tokens // block_size_tokens + 1})
    return EngineParams(resized, block_size_tokens=block_size_tokens)


def one_engine(device: str, kv_tokens: int | None = None) -> Cluster:
    """One replica, which needs no prefix index to be routed to."""
    return Cluster(engine(device, kv_tokens), 1, kv_events=False)


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A family that asks from the same documents whenever it is asked: what is measured on it holds for the trace."""

    family: Family
    seed: int

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """As the family's, with a generator of its own."""
        return self.family.prompts(phases, np.random.default_rng(self.seed))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a family was measured to need."""

    kv_tokens: int
    """Cache of the size that was asked for."""
    capacity_per_s: Mapping[str, float]
    """Requests a second of FCFS and LRU with a full queue and a warm cache of that size, for each phase's mix."""


@lru_cache(maxsize=4)
def sizes(
    family: Family, device: str, cache_share: float, output_tokens: int = 1, mixes: tuple[str, ...] = ("calm",)
) -> Sizes:
    """Size the cache at this share of the first mix's reusable tokens, and measure each mix's capacity with it."""
    samples = {
        mix: saturated(SaturatedParams(family, SIZING_REQUESTS, output_tokens, mix), np.random.default_rng(0))
        for mix in mixes
    }
    kv_tokens = cache_tokens(samples[mixes[0]], cache_share)
    cluster = one_engine(device, kv_tokens)
    return Sizes(kv_tokens, {mix: completed_per_s(sample, cluster) for mix, sample in samples.items()})


def cache_tokens(sample: Sequence[Arrival], cache_share: float) -> int:
    """This share of the reusable tokens, and in any case room for any request and the step that follows it."""
    longest = max(len(one.prompt) + one.output_tokens for one in sample)
    return max(round(cache_share * reusable_tokens(sample, BLOCK_SIZE_TOKENS)), longest + 2_048)


def completed_per_s(sample: Sequence[Arrival], cluster: Cluster) -> float:
    """Requests a second that FCFS and LRU complete once warm, with all of `sample` waiting from the start."""
    served = Simulation(cluster, BASELINE, 0).run(at_once(sample))
    ends_s = np.sort([one.arrival_s + one.latency_s for one in served])
    warm = int(WARM_SHARE * len(ends_s))
    return float((len(ends_s) - warm) / (ends_s[-1] - ends_s[warm - 1]))
