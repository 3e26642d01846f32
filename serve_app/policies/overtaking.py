"""Who has been overtaken by how much: the accounts behind `carried`, in tokens run, kept across engine steps.

Later than a request is one with a larger (priority, arrival, number of admission to the queue). An account opens when a
request enters the waiting queue and closes when its prefill is over, so that what passes a running prefill is charged
to the same account as what passes a waiting request. Cost: O(n) a charged request, vectorised; O(n log n) a step that
opens accounts.
"""

from collections.abc import Iterable

import numpy as np

from serve_app.policies.carried import MEMORY_HALF_LIFE_S
from serve_app.policies.fairway import FloatArray, IntArray


class LongestWait:
    """The largest of the waits that were noted, in tokens, fading by half every `MEMORY_HALF_LIFE_S`."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._noted_s = 0.0

    def note(self, ahead_tokens: float, now_s: float) -> float:
        """Returns: the longest of late, `ahead_tokens` included. A clock that was set back forgets nothing."""
        elapsed_s = max(now_s - self._noted_s, 0.0)
        self._tokens = max(ahead_tokens, self._tokens * 0.5 ** (elapsed_s / MEMORY_HALF_LIFE_S))
        self._noted_s = now_s
        return self._tokens


def ahead_tokens(todo_tokens: IntArray, in_order: IntArray, running_tokens: int) -> IntArray:
    """What must run up to each request's first token, were the queue served in order.

    todo_tokens: (n,), still to compute of each. in_order: (n,), the permutation from first to last.
    running_tokens: what is left of the prefills that run.
    Returns: (n,), tokens, the request's own included.
    """
    ahead = np.empty(len(in_order), dtype=np.int64)
    ahead[in_order] = running_tokens + np.cumsum(todo_tokens[in_order])
    return ahead


def allowance_tokens(
    fast_weight: float, ahead: IntArray | FloatArray, longest_tokens: float, step_tokens: int
) -> FloatArray:
    """How many tokens of later requests may run before each: (n,), at least one step's budget."""
    allowance: FloatArray = np.maximum(step_tokens, (1 + 1 / fast_weight) * longest_tokens - ahead)
    return allowance


def overtaken_tokens(
    priority: IntArray, arrival_s: FloatArray, number: IntArray, ran: Iterable[tuple[int, float, int, int]]
) -> IntArray:
    """What one step ran of later requests, for each request: (n,), tokens.

    priority, arrival_s, number: (n,), what a request is ordered by. ran: (priority, arrival, number, tokens) of each
    request whose prompt was computed in the step.
    """
    overtaken = np.zeros(len(arrival_s), dtype=np.int64)
    for of_priority, at_s, of_number, tokens in ran:
        is_earlier = (arrival_s < at_s) | ((arrival_s == at_s) & (number < of_number))
        overtaken[(priority < of_priority) | ((priority == of_priority) & is_earlier)] += tokens
    return overtaken


def in_order_of_arrival(priority: IntArray, arrival_s: FloatArray, number: IntArray) -> IntArray:
    """(n,), the permutation from the first request to the last."""
    order: IntArray = np.lexsort((number, arrival_s, priority))
    return order
