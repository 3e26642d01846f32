"""fairway-carried: hits first while nobody older suffers, by a ledger of overtaking that is carried across steps.

The published Fairway starts its ledgers anew at every step, so a miss longer than a step can be held up for ever,
and hits wait for it though it is in no hurry. Here every waiting request i keeps its own account, in tokens:

    ahead        V  what had to run up to its first token when it came, were the queue served in order: what was left of
                    running prefills, the requests before it, and its own
    longest wait H  the largest V of late; half of it is forgotten every `MEMORY_HALF_LIFE_S`
    allowance    A  max(one step's token budget, (1 + 1/fast_weight) H - V), fixed when it comes
    overtaken    o  tokens that were run of later requests since

A request is due when o >= A. Due requests go first, oldest first. All others go by score, highest first:

    h/c + w / (patience_multiple x its size class)

with h, c and w as in `fairway`. Size classes are decades: up to four times what is usual counts as usual, the next ten
times as ten times that, and so on, where usual are the mean expected prefill seconds of the full prompts that came of
late, and a request's own are those of what it still has to compute. Within a class waiting counts alike, so requests of
like size keep the order in which they came; ten times the work is ten times the patience.

Bound: what runs until i's first token is at most max((1 + 1/fast_weight) H, V + S) + S + R tokens, where S is a step's
token budget and R what the one later request that runs in part when i comes due still has to prefill. So nobody waits
for more than a quarter (by default) longer than the unluckiest request of late would have waited in order of arrival,
give or take a step and a request. Proof: `docs/design.md`.

The functions hold no state; the accounts and what is usual are kept by `queue_order.QueueOrder`.
Source: ours; it keeps Fairway's terms and its fast weight. Cost: two sorts, O(n log n).
"""

import numpy as np
import numpy.typing as npt

from serve_app.policies.fairway import FairwayParams, FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]

_LEAST_PREFILL_S = 1e-6
"""Under it prefills count as equal, as a logarithm needs something above 0."""
SIZE_CLASS_RATIO = 10.0
"""Expected prefill seconds of one size class over those of the next smaller one."""
USUAL_UP_TO = 4.0
"""Times the usual prefill seconds that still count as usual."""
MEMORY_HALF_LIFE_S = 60.0
"""After so long without a longer one, half of the longest wait is forgotten, seconds."""


def carried_order(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
    usual_prefill_s: float | None = None,
) -> IntArray:
    """Order a waiting queue in which nobody is due; arrays as in `fairway.waiting_order`.

    usual_prefill_s: mean expected prefill seconds of the full prompts that came of late, above 0; None: of the queue.
    """
    if not len(arrival_s):
        return np.empty(0, dtype=np.int64)
    work = np.maximum(todo_tokens, 1)
    full_s = np.maximum(prefill_s, _LEAST_PREFILL_S)
    # What is left of a prompt is taken to cost its share of the whole prompt's seconds.
    left_s = full_s * (work / (hit_tokens + work))
    usual_s = usual_prefill_s or float(full_s.mean())
    patience_s = params.patience_multiple * size_class_s(left_s, usual_s)
    order: IntArray = np.lexsort((arrival_s, -(hit_tokens / work + waited_s / patience_s)))
    return order


def size_class_s(left_s: FloatArray, usual_s: float) -> FloatArray:
    """The class of each of `left_s` (n,), above 0: `usual_s` times a power of `SIZE_CLASS_RATIO`, (n,), seconds."""
    exponent = np.ceil(np.log(left_s / (USUAL_UP_TO * usual_s)) / np.log(SIZE_CLASS_RATIO))
    size_class: FloatArray = usual_s * SIZE_CLASS_RATIO**exponent
    return size_class


def due_first(order: IntArray, is_due: BoolArray, arrival_s: FloatArray) -> IntArray:
    """Move the due requests to the front, oldest first; the rest keep their order.

    order: (n,), a permutation. is_due: (n,), bool, by index. arrival_s: (n,), by index.
    Returns: (n,), a permutation.
    """
    due = np.flatnonzero(is_due)
    if not len(due):
        return order
    oldest_first = due[np.argsort(arrival_s[due], kind="stable")]
    return np.concatenate([oldest_first, order[~is_due[order]]])
