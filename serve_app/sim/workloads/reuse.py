"""How much of a workload repeats: tokens worth caching, and what a cache without limit would hit.

Counted in KV blocks as prefix chains: a block is the same only if all blocks before it are. Both walk the prompts in
lexicographic order, where neighbours share the longest prefixes: with s_i the blocks that prompt i shares with the one
before, the chains that occur at least twice number sum(max(0, s_i - s_(i-1))). Exact, no hashes. Cost: O(tokens + n log
n comparisons).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from serve_app.sim.arrivals import Arrival
from serve_app.sim.draws import IntArray, TokenArray


def reusable_tokens(arrivals: Sequence[Arrival], block_size_tokens: int = 16) -> int:
    """Tokens of the distinct full blocks that occur in at least two prompts.

    Raises:
        ValueError: a block size below 1.
    """
    shared = _shared_with_previous(*_sorted_prompts(arrivals, block_size_tokens), block_size_tokens)
    return int(np.maximum(np.diff(shared, prepend=0), 0).sum()) * block_size_tokens


def infinite_cache_hit_rate(arrivals: Sequence[Arrival], block_size_tokens: int = 16) -> float:
    """Share of all prompt tokens that lie in full blocks of earlier prompts; 0 without prompts.

    Earlier is earlier in `arrivals`. A prompt is never covered whole: an engine computes at least its last token.

    Raises:
        ValueError: a block size below 1.
    """
    prompts, order = _sorted_prompts(arrivals, block_size_tokens)
    shared = [*_shared_with_previous(prompts, order, block_size_tokens).tolist(), 0]
    lengths = [len(one.prompt) for one in arrivals]
    place = np.argsort(order).tolist()
    before, after = list(range(-1, len(place) - 1)), list(range(1, len(place) + 1))
    hit_tokens = 0
    # From the last arrival back, each leaves the sorted list when it is done: its neighbours are then earlier arrivals,
    # and what the two share with each other is the lesser of what each shared with it.
    for arrival in reversed(range(len(place))):
        here = place[arrival]
        left, right = before[here], after[here]
        blocks = max(shared[here], shared[right])
        hit_tokens += min(blocks, (lengths[arrival] - 1) // block_size_tokens) * block_size_tokens
        shared[right] = min(shared[here], shared[right])
        if left >= 0:
            after[left] = right
        if right < len(place):
            before[right] = left
    return hit_tokens / sum(lengths) if lengths else 0.0


def _sorted_prompts(arrivals: Sequence[Arrival], block_size_tokens: int) -> tuple[list[TokenArray], list[int]]:
    """The prompts' full blocks, and the order that sorts them."""
    if block_size_tokens < 1:
        raise ValueError(f"block_size_tokens is {block_size_tokens}; it must be at least 1")
    prompts = [one.prompt[: len(one.prompt) // block_size_tokens * block_size_tokens] for one in arrivals]
    # Bytes compare fast, and any total order in which common prefixes lie together will do.
    keys = [prompt.tobytes() for prompt in prompts]
    return prompts, sorted(range(len(keys)), key=keys.__getitem__)


def _shared_with_previous(prompts: Sequence[TokenArray], order: Sequence[int], block_size_tokens: int) -> IntArray:
    """(n,), full blocks that each prompt shares with the one before it in the order; 0 for the first."""
    common = [_common_tokens(prompts[one], prompts[other]) // block_size_tokens for one, other in pairwise(order)]
    return np.asarray([0, *common][: len(order)], dtype=np.int64)


def _common_tokens(one: TokenArray, other: TokenArray) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
