"""Orderings that serve the highest score first: LPM, RAGCache, PEEK and the two that let waiting count.

With h tokens cached, c = max(1, tokens still to compute), w seconds waited and P expected prefill seconds of the full
prompt, the scores are

    lpm             h
    ragcache        h/c
    peek            P h/(h + c), the prefill seconds that the cache saves
    absolute-wait   h/c + w / 1 s
    relative-wait   h/c + w/SLO, Fairway's Fast lane alone

The first three starve a request without hits for as long as hits keep coming. In the other two a request's score grows
without limit while it waits, so none waits for ever; but nothing bounds the work placed ahead of it in one step.

Sources: SGLang's `lpm` (lpm); RAGCache, cached length over compute length (ragcache); PEEK (peek; it also protects the
blocks that waiting requests need, `EnginePolicy.protect_waiting`); the house design, "The algorithms" (the wait terms).
The arrays are those of `fairway.waiting_order`. Cost: one sort, O(n log n).
"""

import numpy as np

from serve_app.policies.fairway import FairwayParams, FloatArray, IntArray, absolute_scores, fast_scores


def lpm(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """Longest prefix match first, in tokens."""
    return _highest_first(hit_tokens, arrival_s)


def ragcache(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """Most cached tokens for each token to compute first."""
    return _highest_first(hit_tokens / np.maximum(todo_tokens, 1), arrival_s)


def peek(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """Most prefill seconds saved by the cache first."""
    saved_s = prefill_s * (hit_tokens / (hit_tokens + np.maximum(todo_tokens, 1)))
    return _highest_first(saved_s, arrival_s)


def absolute_wait(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """Cache hits and seconds waited, on one scale for every request."""
    return _highest_first(absolute_scores(hit_tokens, np.maximum(todo_tokens, 1), waited_s), arrival_s)


def relative_wait(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """Cache hits and patience used up: Fairway's Fast lane without the Fair lane."""
    work = np.maximum(todo_tokens, 1)
    return _highest_first(fast_scores(params, hit_tokens, work, waited_s, prefill_s), arrival_s)


def _highest_first(score: FloatArray | IntArray, arrival_s: FloatArray) -> IntArray:
    """By `score` (n,), highest first, then by arrival, then by index."""
    order: IntArray = np.lexsort((arrival_s, -score))
    return order
