"""Slow, obvious versions of the policies, read straight off the design; the tests hold the fast ones against them."""

from collections.abc import Iterable, Sequence

from serve_app.policies import FairwayParams


def slow_waiting_order(
    params: FairwayParams,
    hit_tokens: Sequence[int],
    todo_tokens: Sequence[int],
    waited_s: Sequence[float],
    prefill_s: Sequence[float],
    arrival_s: Sequence[float],
) -> list[int]:
    """Fairway, searching each lane from its front every time."""
    everyone = range(len(arrival_s))
    work = [max(1, todo) for todo in todo_tokens]

    def score(i: int) -> float:
        patience_s = max(params.patience_floor_s, params.patience_multiple * prefill_s[i])
        return hit_tokens[i] / work[i] + waited_s[i] / patience_s

    lanes = {
        "fast": sorted(everyone, key=lambda i: (-score(i), arrival_s[i], i)),
        "fair": sorted(everyone, key=lambda i: (arrival_s[i], i)),
    }
    weight = {"fast": params.fast_weight, "fair": 1.0}
    ledger = {lane: weight[lane] * work[order[0]] for lane, order in lanes.items() if order}
    placed: list[int] = []
    while len(placed) < len(work):
        lane = "fast" if ledger["fast"] <= ledger["fair"] else "fair"
        front = next(i for i in lanes[lane] if i not in placed)
        placed.append(front)
        ledger[lane] += weight[lane] * work[front]
    return placed


class SlowRlt:
    """RLT that recomputes its leaves from all blocks each time; it says which draws are allowed and draws none."""

    def __init__(self, num_blocks: int) -> None:
        self.used: set[int] = set()
        self.uncached_stack = list(reversed(range(num_blocks)))
        self.parent: dict[int, int | None] = {}
        """Cached blocks, each with its cached parent."""
        self.marked: set[int] = set()
        self.touched_this_step: set[int] = set()

    def free_cached(self) -> set[int]:
        return set(self.parent) - self.used

    def allowed_draws(self) -> set[int]:
        if self.uncached_stack:
            return {self.uncached_stack[-1]}
        leaves = {block for block in self.free_cached() if block not in self.parent.values()}
        if leaves and leaves <= self.marked:
            self.marked = set(self.touched_this_step)
            if leaves <= self.marked:
                self.marked, self.touched_this_step = set(), set()
        return leaves - self.marked or self.free_cached()

    def take(self, block: int) -> None:
        if block in self.uncached_stack:
            self.uncached_stack.remove(block)
        self._forget(block)
        self.used.add(block)

    def claim(self, block: int) -> None:
        if block in self.uncached_stack:
            self.uncached_stack.remove(block)
        self.used.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        for block in reversed(list(blocks)):
            self.used.remove(block)
            if block in self.parent:
                self.marked.add(block)
                self.touched_this_step.add(block)
            else:
                self.uncached_stack.append(block)

    def cache(self, block: int, parent: int | None) -> None:
        self._forget(block)
        self.parent[block] = parent if parent in self.parent else None

    def uncache(self, block: int) -> None:
        if block in self.parent:
            self._forget(block)
            if block not in self.used:
                self.uncached_stack.append(block)

    def _forget(self, gone: int) -> None:
        self.parent = {block: None if p == gone else p for block, p in self.parent.items() if block != gone}
