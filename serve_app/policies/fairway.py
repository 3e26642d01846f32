"""Fairway: the order of a waiting queue, from a Fast lane and a Fair lane merged by their ledgers of work.

For each waiting request, with h tokens cached, c = max(1, tokens still to compute), w seconds waited and a patience of
SLO = max(floor, multiple x expected prefill seconds):

    Fast lane: h/c + w/SLO, highest first        Fair lane: earliest arrival first

A lane's ledger starts at the work of the lane's first request. Again and again the lane with the smaller ledger (Fast
on a tie) places its front request and adds that request's own work to its ledger; Fast work counts `fast_weight` times.
What one lane placed the other skips.

Bound: the work placed ahead of the oldest request is at most its own / `fast_weight`, plus one request. Proof: while
the oldest (work c) waits, Fair's ledger is c; before Fast places another request its ledger, `fast_weight` x (its first
front + all that it placed), is at most c.

The bound holds for any score, and so for `absolute_waiting_order` too: an ablation with h/c + w / 1 s in the Fast lane,
one scale of waiting for every request. A score grows without limit with w, so no request waits for ever under either.

Source: the house design, "The algorithms". Cost: two sorts, O(n log n), and a linear merge.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ABSOLUTE_WAIT_SCALE_S = 1.0
"""Seconds of waiting that count as much as one cached token for each token to compute, for every request alike."""


@dataclass(frozen=True, slots=True)
class FairwayParams:
    """Fairway's three numbers; the defaults are the published ones."""

    fast_weight: float = 4.0
    """How many times the Fast lane's work counts, at least 1; larger holds the oldest request up for less."""
    patience_multiple: float = 3.0
    """Patience in expected prefill times, above 0; smaller lets waiting outweigh cache hits sooner."""
    patience_floor_s: float = 1.0
    """Least patience of any request in seconds, above 0."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        if not 1.0 <= self.fast_weight < math.inf:
            raise ValueError(f"fast_weight is {self.fast_weight}; it must be finite and at least 1")
        for name in ("patience_multiple", "patience_floor_s"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and above 0")


def waiting_order(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """Order a waiting queue by Fairway.

    hit_tokens: (n,), prompt tokens whose KV is cached, >= 0.
    todo_tokens: (n,), tokens still to compute; below 1 counts as 1.
    waited_s: (n,), seconds since arrival, >= 0.
    prefill_s: (n,), expected prefill seconds of the full prompt on an idle engine, >= 0.
    arrival_s: (n,), arrival times on any one clock; equal scores go by arrival, then by index.
    Returns: (n,), a permutation of the indices, first served first.
    """
    work = np.maximum(todo_tokens, 1)
    return _merge_lanes(params, fast_scores(params, hit_tokens, work, waited_s, prefill_s), work, arrival_s)


def absolute_waiting_order(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """Order a waiting queue by Fairway with the Fast lane scored by `absolute_scores`; arrays as in `waiting_order`."""
    work = np.maximum(todo_tokens, 1)
    return _merge_lanes(params, absolute_scores(hit_tokens, work, waited_s), work, arrival_s)


def fast_scores(
    params: FairwayParams, hit_tokens: IntArray, work: IntArray, waited_s: FloatArray, prefill_s: FloatArray
) -> FloatArray:
    """h/c + w/SLO. Arrays as in `waiting_order`, `work` (n,) at least 1. Returns: (n,), without unit."""
    patience_s = np.maximum(params.patience_floor_s, params.patience_multiple * prefill_s)
    score: FloatArray = hit_tokens / work + waited_s / patience_s
    return score


def absolute_scores(hit_tokens: IntArray, work: IntArray, waited_s: FloatArray) -> FloatArray:
    """h/c + w / 1 s. Arrays as in `fast_scores`. Returns: (n,), without unit."""
    score: FloatArray = hit_tokens / work + waited_s / ABSOLUTE_WAIT_SCALE_S
    return score


def _merge_lanes(params: FairwayParams, score: FloatArray, work: IntArray, arrival_s: FloatArray) -> IntArray:
    """Merge the Fast lane, highest `score` first, with the Fair lane.

    score: (n,), without unit. work: (n,), tokens, at least 1. arrival_s: as in `waiting_order`.
    Returns: (n,), a permutation of the indices, first served first.
    """
    fast = np.lexsort((arrival_s, -score))
    fair = np.argsort(arrival_s, kind="stable")
    order = _merge(fast.tolist(), fair.tolist(), work.tolist(), params.fast_weight)
    return np.array(order, dtype=np.int64)


def _merge(fast: list[int], fair: list[int], work: list[int], fast_weight: float) -> list[int]:
    """Merge two orders of the same n requests by their ledgers; Python lists, as numpy scalars are ten times slower."""
    order: list[int] = []
    if not fast:
        return order
    placed = bytearray(len(work))
    next_fast = next_fair = 0
    fast_ledger, fair_ledger = fast_weight * work[fast[0]], float(work[fair[0]])
    while len(order) < len(work):
        if fast_ledger <= fair_ledger:
            while placed[fast[next_fast]]:
                next_fast += 1
            pick = fast[next_fast]
            fast_ledger += fast_weight * work[pick]
        else:
            while placed[fair[next_fair]]:
                next_fair += 1
            pick = fair[next_fair]
            fair_ledger += work[pick]
        placed[pick] = 1
        order.append(pick)
    return order
