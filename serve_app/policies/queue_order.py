"""The order of one engine's waiting queue from step to step: the ordering by name, and the accounts behind it.

Pure but for its own state. The caller keeps a `RequestTable` current, tells what each step ran, and asks for the order.
Cost: O(n log n) an order, O(n) a charged prefill, vectorised.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from serve_app.config import EnginePolicy
from serve_app.policies.carried import BoolArray, carried_order
from serve_app.policies.fairway import FairwayParams, FloatArray, IntArray
from serve_app.policies.orderings import ORDERINGS, Ordering, order_within_classes
from serve_app.policies.overtaking import (
    LongestWait,
    ahead_tokens,
    allowance_tokens,
    in_order_of_arrival,
    overtaken_tokens,
)
from serve_app.policies.request_table import RequestTable

USUAL_WEIGHT = 0.01
"""What one more prompt counts in the running mean of expected prefill seconds, once a hundred have come."""


class QueueOrder:
    """What an order needs to know of the steps before."""

    def __init__(self, policy: EnginePolicy, step_tokens: int) -> None:
        """`step_tokens`: token budget of an engine step."""
        self._step_tokens = step_tokens
        self._longest_wait = LongestWait()
        self._usual_prefill_s = 0.0
        self._num_prompts = 0
        self.follow(policy)

    def follow(self, policy: EnginePolicy) -> None:
        """Order by this policy from now on; the accounts go on."""
        self.policy = policy
        self.params = FairwayParams(policy.fast_weight, policy.patience(), policy.patience_floor_s)

    def open_accounts(
        self,
        table: RequestTable[Any],
        new: Sequence[int],
        prefill_s: Sequence[float] | FloatArray,
        running_tokens: int,
        now_s: float,
    ) -> None:
        """Fix how far each of the new rows may be overtaken.

        new: k rows. prefill_s: (k,), expected prefill seconds of their full prompts.
        running_tokens: what is left of the prefills that run.
        """
        for seconds in prefill_s:
            self._num_prompts += 1
            self._usual_prefill_s += (seconds - self._usual_prefill_s) * max(1 / self._num_prompts, USUAL_WEIGHT)
        rows = table.waiting_rows()
        todo = _todo_tokens(table, rows)
        if len(rows) == 1:
            of_new = todo + running_tokens
        else:
            of_new = ahead_tokens(todo, self._in_order(table, rows), running_tokens)[np.isin(rows, new)]
        longest = self._longest_wait.note(float(of_new.max()), now_s)
        table.allowance_tokens[new] = allowance_tokens(self.policy.fast_weight, of_new, longest, self._step_tokens)

    def charge(self, table: RequestTable[Any], ran: Sequence[tuple[int, int]]) -> None:
        """Charge to each row what the step ran of later ones. ran: (row, prompt tokens) of each that was computed."""
        rows = table.rows()
        keys = [(int(table.priority[r]), float(table.arrival_s[r]), int(table.number[r]), tokens) for r, tokens in ran]
        overtaken = overtaken_tokens(table.priority[rows], table.arrival_s[rows], table.number[rows], keys)
        table.overtaken_tokens[rows] += overtaken

    def is_due(self, table: RequestTable[Any], rows: IntArray) -> BoolArray:
        """(n,), whether each of these rows has been overtaken as far as it may be."""
        due: BoolArray = table.overtaken_tokens[rows] >= table.allowance_tokens[rows]
        return due

    def order(self, table: RequestTable[Any], rows: IntArray, prefill_s: FloatArray, now_s: float) -> IntArray:
        """Order these n rows of waiting requests.

        prefill_s: (n,), expected prefill seconds of the full prompts. Returns: (n,), a permutation of the indices.
        """
        arrival_s, hit_tokens = table.arrival_s[rows], table.hit_tokens[rows]
        # The front end stamps arrivals, maybe on another machine: its clock may be ahead.
        waited_s = np.maximum(now_s - arrival_s, 0.0)
        is_due = self.is_due(table, rows)
        return order_within_classes(
            self._ordering(),
            self.params,
            table.priority[rows],
            hit_tokens,
            _todo_tokens(table, rows),
            waited_s,
            prefill_s,
            arrival_s,
            is_due if self.policy.is_carried else None,
        )

    def _ordering(self) -> Ordering:
        if self.policy.is_carried:
            return partial(carried_order, usual_prefill_s=self._usual_prefill_s)
        return ORDERINGS[self.policy.ordering]

    def _in_order(self, table: RequestTable[Any], rows: IntArray) -> IntArray:
        return in_order_of_arrival(table.priority[rows], table.arrival_s[rows], table.number[rows])


def _todo_tokens(table: RequestTable[Any], rows: IntArray) -> IntArray:
    return table.all_tokens[rows] - table.hit_tokens[rows]
