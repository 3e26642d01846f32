"""Orders of a waiting queue under one signature, chosen by name.

Every ordering takes Fairway's parameters and five arrays of shape (n,) and answers a permutation of their indices,
first served first; see `fairway.waiting_order` for the arrays. Ties go by arrival, then by index, so every order is
total. An ordering that needs fewer arrays ignores the rest. Their modules say which of them can starve a request.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from serve_app.policies.carried import BoolArray, carried_order, due_first
from serve_app.policies.fairway import FairwayParams, FloatArray, IntArray, absolute_waiting_order, waiting_order
from serve_app.policies.highest_score import absolute_wait, lpm, peek, ragcache, relative_wait
from serve_app.policies.taking_turns import k_lpm, preble

Ordering: TypeAlias = Callable[[FairwayParams, IntArray, IntArray, FloatArray, FloatArray, FloatArray], IntArray]


def fcfs(
    params: FairwayParams,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
) -> IntArray:
    """First come, first served: by arrival. Starves nobody. O(n log n)."""
    order: IntArray = np.argsort(arrival_s, kind="stable")
    return order


ORDERINGS: dict[str, Ordering] = {
    "fairway-carried": carried_order,
    "fairway": waiting_order,
    "fcfs": fcfs,
    "lpm": lpm,
    "k-lpm-4": k_lpm(4),
    "k-lpm-8": k_lpm(8),
    "ragcache": ragcache,
    "preble": preble,
    "peek": peek,
    "absolute-wait": absolute_wait,
    "relative-wait": relative_wait,
    "fairway-absolute-wait": absolute_waiting_order,
}
"""Orderings by the name that the settings use."""

ORDERINGS_BY_ARRIVAL_ALONE = frozenset({"fcfs"})
"""Names of those that read nothing but `arrival_s`, so that a caller may leave the other arrays uncomputed."""


def order_within_classes(
    ordering: Ordering,
    params: FairwayParams,
    priority: IntArray,
    hit_tokens: IntArray,
    todo_tokens: IntArray,
    waited_s: FloatArray,
    prefill_s: FloatArray,
    arrival_s: FloatArray,
    is_due: BoolArray | None = None,
) -> IntArray:
    """Smaller `priority` (n,) first; within each class those that are due (n,), oldest first, then by `ordering`."""
    parts = [np.empty(0, dtype=np.int64)]
    for priority_class in np.unique(priority):
        m = np.flatnonzero(priority == priority_class)
        order = ordering(params, hit_tokens[m], todo_tokens[m], waited_s[m], prefill_s[m], arrival_s[m])
        parts.append(m[order if is_due is None else due_first(order, is_due[m], arrival_s[m])])
    return np.concatenate(parts)
