"""Who may start while the request at the front does not fit into the free KV blocks.

vLLM stops admitting at the first request that doesn't fit. Here those that fit go before those that don't, until one
that is due (see `carried`) doesn't fit: nobody passes that one, so the blocks that come free are its own. What passes
the others is charged to their accounts like any other overtaking, so each becomes due in the end. Nothing is retried
within a step, so nothing spins. Cost: O(n).
"""

import numpy as np

from serve_app.policies.carried import BoolArray
from serve_app.policies.fairway import IntArray


def fitting_first(order: IntArray, fits: BoolArray, is_due: BoolArray) -> IntArray:
    """Let those that fit pass those that don't, as far as nobody due is passed.

    order: (n,), a permutation. fits, is_due: (n,), by index.
    Returns: (n,), a permutation.
    """
    blocking = np.flatnonzero(is_due[order] & ~fits[order])
    last = int(blocking[0]) if len(blocking) else len(order)
    head, due, rest = order[:last], order[last : last + 1], order[last + 1 :]
    return np.concatenate([head[fits[head]], due, head[~fits[head]], rest])
