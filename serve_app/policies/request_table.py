"""Numbers about requests in columns, so that a step over ten thousand of them is a few array operations.

A row belongs to one request from `add` to `remove`; rows are reused. Cost: O(1) a call, amortised.
"""

from typing import Generic, TypeVar

import numpy as np

from serve_app.policies.carried import BoolArray
from serve_app.policies.fairway import FloatArray, IntArray

Request = TypeVar("Request")

COLUMNS: dict[str, type[np.generic]] = {
    "priority": np.int64,
    "arrival_s": np.float64,
    "number": np.int64,
    "prompt_tokens": np.int64,
    "all_tokens": np.int64,
    "hit_tokens": np.int64,
    "overtaken_tokens": np.int64,
    "allowance_tokens": np.float64,
    "is_waiting": np.bool_,
}


class RequestTable(Generic[Request]):
    """Columns of shape (capacity,), of which the rows of `row_of` mean something."""

    priority: IntArray
    """Smaller is served first."""
    arrival_s: FloatArray
    number: IntArray
    """Counts the rows that were ever added: what tells requests of one arrival time apart."""
    prompt_tokens: IntArray
    all_tokens: IntArray
    """The prompt and what was generated before a preemption."""
    hit_tokens: IntArray
    overtaken_tokens: IntArray
    allowance_tokens: FloatArray
    """What may be run of later requests; see `overtaking`."""
    is_waiting: BoolArray
    """False while the request's prefill runs, and in rows of nobody."""

    def __init__(self, capacity: int = 256) -> None:
        """Raises ValueError unless `capacity` is at least 1."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        self.row_of: dict[str, int] = {}
        self.requests: list[Request | None] = [None] * capacity
        self._free = list(reversed(range(capacity)))
        self._num_added = 0
        for name, kind in COLUMNS.items():
            setattr(self, name, np.zeros(capacity, dtype=kind))

    def add(
        self,
        request_id: str,
        request: Request,
        priority: int,
        arrival_s: float,
        prompt_tokens: int,
        all_tokens: int,
    ) -> int:
        """A waiting request's new row. Raises ValueError when it has one."""
        if request_id in self.row_of:
            raise ValueError(f"request {request_id!r} has a row already")
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.row_of[request_id], self.requests[row] = row, request
        self.priority[row], self.arrival_s[row], self.number[row] = priority, arrival_s, self._num_added
        self.prompt_tokens[row], self.all_tokens[row], self.hit_tokens[row] = prompt_tokens, all_tokens, 0
        self.overtaken_tokens[row], self.allowance_tokens[row], self.is_waiting[row] = 0, np.inf, True
        self._num_added += 1
        return row

    def remove(self, request_id: str) -> int:
        """Give the row back; returns it. Raises KeyError when the request has none."""
        row = self.row_of.pop(request_id)
        self.requests[row], self.is_waiting[row] = None, False
        self._free.append(row)
        return row

    def waiting_rows(self) -> IntArray:
        """(n,), rows of the n waiting requests, in the order in which they were added."""
        rows = np.flatnonzero(self.is_waiting)
        in_order: IntArray = rows[np.argsort(self.number[rows])]
        return in_order

    def rows(self) -> IntArray:
        """(m,), rows of all requests, in the order in which they were added."""
        return np.fromiter(self.row_of.values(), dtype=np.int64, count=len(self.row_of))

    def _grow(self) -> None:
        capacity = len(self.requests)
        self._free.extend(reversed(range(capacity, 2 * capacity)))
        self.requests.extend([None] * capacity)
        for name in COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))

    def check_integrity(self) -> None:
        """Assert that each row is either free or one request's."""
        used = list(self.row_of.values())
        assert len(used) == len(set(used))
        assert sorted([*used, *self._free]) == list(range(len(self.requests)))
        assert {row for row, request in enumerate(self.requests) if request is not None} == set(used)
        assert set(self.waiting_rows().tolist()) <= set(used)
