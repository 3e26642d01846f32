"""Orderings that let several lanes take turns, each up to its quota a round: k-LPM and Preble.

    k-lpm-K   the oldest request not yet placed, then the K - 1 longest prefix matches of the rest; and again
    preble    ten groups by hit ratio, group g = 1 + floor(10 h/(h + c)); in a round the highest group places up to
              10 x 10 requests, then the next up to 10 x 9, down to 10 x 1; each group in order of arrival; and again

with h tokens cached and c = max(1, tokens still to compute). What one lane placed the others skip. A call starts at the
first turn of a round and knows nothing of earlier calls. So k-LPM, whose round begins with the oldest, starves nobody,
while Preble starves its low groups for as long as the higher ones can fill every step: its turns are about one call,
not about time.

Sources: k-LPM (the oldest and k - 1 by prefix); Preble (priority groups by hit ratio, served in proportion). The house
experiments name Preble's quota "up to 10 x g". The arrays are those of `fairway.waiting_order`.
Cost: sorts, O(n log n), and a linear merge.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np

from serve_app.policies.fairway import FairwayParams, FloatArray, IntArray

PREBLE_GROUPS = 10
"""Groups by hit ratio; group g holds the ratios from (g - 1)/10 up to g/10."""
PREBLE_QUOTA_STEP = 10
"""Requests that group g may place in a round, for each 1 of g."""


def k_lpm(k: int) -> Callable[[FairwayParams, IntArray, IntArray, FloatArray, FloatArray, FloatArray], IntArray]:
    """The k-LPM ordering for one `k`, at least 1; 1 is FCFS. Raises ValueError below."""
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")

    def ordering(
        params: FairwayParams,
        hit_tokens: IntArray,
        todo_tokens: IntArray,
        waited_s: FloatArray,
        prefill_s: FloatArray,
        arrival_s: FloatArray,
    ) -> IntArray:
        oldest = np.argsort(arrival_s, kind="stable")
        longest = np.lexsort((arrival_s, -hit_tokens))
        return _take_turns([(oldest, 1), (longest, k - 1)], len(arrival_s))

    return ordering


def preble(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """Ten groups by hit ratio taking turns, highest first."""
    group = 1 + PREBLE_GROUPS * hit_tokens // (hit_tokens + np.maximum(todo_tokens, 1))
    oldest = np.argsort(arrival_s, kind="stable")
    lanes = [(oldest[group[oldest] == g], PREBLE_QUOTA_STEP * g) for g in range(PREBLE_GROUPS, 0, -1)]
    return _take_turns(lanes, len(arrival_s))


def _take_turns(lanes: list[tuple[IntArray, int]], num_requests: int) -> IntArray:
    """Rounds over `lanes`, each the order of its requests and its quota a round; together they name all requests.

    At least one lane names them all or every quota is above 0, so each round places something.
    """
    placed = bytearray(num_requests)
    order: list[int] = []
    # A generator looks at `placed` when it is asked, so it skips what other lanes placed meanwhile.
    turns = [((index for index in lane.tolist() if not placed[index]), quota) for lane, quota in lanes]
    while len(order) < num_requests:
        for unplaced, quota in turns:
            for pick in islice(unplaced, quota):
                placed[pick] = 1
                order.append(pick)
    return np.array(order, dtype=np.int64)
