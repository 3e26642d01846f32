"""What became of the requests of one run, as rows.

TTFT is from arrival at the router to the end of the engine step that sampled the first token, latency to the end of the
step that sampled the last one; HTTP, tokenising and the network take no time here. The hit rate is in prompt tokens as
the engine counted them when it first admitted the request. The load share counts requests. A request belongs to the
phase in which it arrived.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 95, 99)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """One finished request."""

    request_id: str
    replica_id: str
    phase: str
    arrival_s: float
    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int


def phase_rows(served: Sequence[Served], num_replicas: int) -> list[Row]:
    """One row a phase, in order of the phases' first arrivals."""
    by_arrival = sorted(served, key=lambda one: (one.arrival_s, one.request_id))
    phases = dict.fromkeys(one.phase for one in by_arrival)
    return [_row(phase, [one for one in by_arrival if one.phase == phase], num_replicas) for phase in phases]


def _row(phase: str, served: Sequence[Served], num_replicas: int) -> Row:
    ttfts_s = [one.ttft_s for one in served]
    latencies_s = [one.latency_s for one in served]
    cached_tokens = sum(one.cached_tokens for one in served)
    return {
        "phase": phase,
        "requests": len(served),
        **_percentiles("ttft", ttfts_s),
        "ttft_max_s": max(ttfts_s),
        **_percentiles("latency", latencies_s),
        "hit_rate": cached_tokens / sum(one.prompt_tokens for one in served),
        "load_max_over_mean": load_max_over_mean([one.replica_id for one in served], num_replicas),
    }


def load_max_over_mean(replica_ids: Sequence[str], num_replicas: int) -> float:
    """Requests on the busiest replica over the mean of all `num_replicas`, those without any included."""
    return max(Counter(replica_ids).values()) * num_replicas / len(replica_ids)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """By linear interpolation between the two nearest ranks."""
    return {
        f"{name}_p{p}_s": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }
