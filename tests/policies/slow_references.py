"""Slow, obvious versions of the policies, read straight off the design; the tests hold the fast ones against them."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from serve_app.policies import FairwayParams

Lane = tuple[list[int], int]


def slow_waiting_order(params: FairwayParams, *columns: Sequence[float]) -> list[int]:
    """Fairway; the columns are those of every ordering."""
    return slow_order("fairway", params, *columns)


def slow_order(name: str, params: FairwayParams, *columns: Sequence[float]) -> list[int]:
    """The ordering of that name, spelled out; `columns` as every ordering takes them."""
    hit_tokens, todo_tokens, waited_s, prefill_s, arrival_s = columns
    everyone = range(len(arrival_s))
    work = [max(1.0, todo) for todo in todo_tokens]

    def relative_score(i: int) -> float:
        patience_s = max(params.patience_floor_s, params.patience_multiple * prefill_s[i])
        return hit_tokens[i] / work[i] + waited_s[i] / patience_s

    def absolute_score(i: int) -> float:
        return hit_tokens[i] / work[i] + waited_s[i] / 1.0

    def highest(score: Callable[[int], float]) -> list[int]:
        return sorted(everyone, key=lambda i: (-score(i), arrival_s[i], i))

    def carried_score(i: int) -> float:
        full_s = [max(seconds, 1e-6) for seconds in prefill_s]
        usual_s = float(np.mean(full_s))
        left_s = full_s[i] * (work[i] / (hit_tokens[i] + work[i]))
        decade = next(d for d in range(-12, 12) if left_s <= 4 * usual_s * 10.0**d)
        return hit_tokens[i] / work[i] + waited_s[i] / (params.patience_multiple * (usual_s * 10.0**decade))

    def group(i: int) -> int:
        return next(g for g in range(1, 11) if 10 * hit_tokens[i] < g * (hit_tokens[i] + work[i]))

    oldest = sorted(everyone, key=lambda i: (arrival_s[i], i))
    longest = highest(lambda i: hit_tokens[i])
    groups = [([i for i in oldest if group(i) == g], 10 * g) for g in range(10, 0, -1)]
    orders: dict[str, Callable[[], list[int]]] = {
        "fcfs": lambda: oldest,
        "lpm": lambda: longest,
        "k-lpm-4": lambda: slow_turns([(oldest, 1), (longest, 3)]),
        "k-lpm-8": lambda: slow_turns([(oldest, 1), (longest, 7)]),
        "ragcache": lambda: highest(lambda i: hit_tokens[i] / work[i]),
        "preble": lambda: slow_turns(groups),
        "peek": lambda: highest(lambda i: prefill_s[i] * (hit_tokens[i] / (hit_tokens[i] + work[i]))),
        "absolute-wait": lambda: highest(absolute_score),
        "relative-wait": lambda: highest(relative_score),
        "fairway-carried": lambda: highest(carried_score),
        "fairway": lambda: slow_lanes(params, highest(relative_score), oldest, work),
        "fairway-absolute-wait": lambda: slow_lanes(params, highest(absolute_score), oldest, work),
    }
    return orders[name]()


def slow_turns(lanes: list[Lane]) -> list[int]:
    """Each lane in turn places its first unplaced requests, as many as its quota, until all are placed."""
    placed: list[int] = []
    while any(set(lane) - set(placed) for lane, _ in lanes):
        for lane, quota in lanes:
            placed += [i for i in lane if i not in placed][:quota]
    return placed


def slow_lanes(params: FairwayParams, fast: list[int], fair: list[int], work: list[float]) -> list[int]:
    """Fairway's merge, searching each lane from its front every time."""
    lanes = {"fast": fast, "fair": fair}
    weight = {"fast": params.fast_weight, "fair": 1.0}
    ledger = {lane: weight[lane] * work[order[0]] for lane, order in lanes.items() if order}
    placed: list[int] = []
    while len(placed) < len(work):
        lane = "fast" if ledger["fast"] <= ledger["fair"] else "fair"
        front = next(i for i in lanes[lane] if i not in placed)
        placed.append(front)
        ledger[lane] += weight[lane] * work[front]
    return placed


class SlowFreeBlocks:
    """A free list that finds its leaves anew from all blocks each time; it says which draws are allowed, draws none."""

    def __init__(self, num_blocks: int, policy: str) -> None:
        """Args: policy: "lru", "lru by call" (blocks released together are equally old), "rlt", or none of them."""
        self.policy = policy
        self.used: set[int] = set()
        self.uncached_stack = list(reversed(range(num_blocks)))
        self.parent: dict[int, int | None] = {}
        """Cached blocks, each with its cached parent."""
        self.pins: Counter[int] = Counter()
        self.touched_at = dict.fromkeys(range(num_blocks), (0, 0))
        """Block -> the call that touched it last, and its place in that call."""
        self.num_calls = 0
        self.marked: set[int] = set()
        self.touched_this_step: set[int] = set()

    def free_cached(self) -> set[int]:
        return set(self.parent) - self.used

    def childless(self) -> set[int]:
        return self.free_cached() - set(self.parent.values())

    def allowed_draws(self) -> set[int]:
        leaves = self.allowed_leaves()
        if self.policy != "rlt":
            return self._of_equal_worth(leaves)
        if not leaves <= self.childless() or any(self.pins[block] for block in leaves):
            return leaves  # nothing but an uncached block, or what is needed
        if leaves <= self.marked:
            self.marked = set(self.touched_this_step)
            if leaves <= self.marked:
                self.marked, self.touched_this_step = set(), set()
        return leaves - self.marked

    def allowed_leaves(self) -> set[int]:
        """All that a policy may choose from, if nothing is known of it."""
        if self.uncached_stack:
            return {self.uncached_stack[-1]}
        leaves = {block for block in self.childless() if not self.pins[block]}
        return leaves or self.childless() or self.free_cached()

    def _of_equal_worth(self, blocks: set[int]) -> set[int]:
        oldest = min(self.touched_at[block] for block in blocks)
        if self.policy == "lru":
            return {block for block in blocks if self.touched_at[block] == oldest}
        return {block for block in blocks if self.touched_at[block][0] == oldest[0]}

    def begin_step(self) -> None:
        self.touched_this_step.clear()

    def take(self, block: int) -> None:
        if block in self.uncached_stack:
            self.uncached_stack.remove(block)
        self._forget(block)
        self.used.add(block)

    def claim(self, block: int) -> None:
        if block in self.uncached_stack:
            self.uncached_stack.remove(block)
        self.used.add(block)

    def release(self, blocks: list[int]) -> None:
        self.used -= set(blocks)
        self.uncached_stack += [block for block in reversed(blocks) if block not in self.parent]
        self._touch(blocks)

    def cache(self, block: int, parent: int | None) -> None:
        self._forget(block)
        self.parent[block] = parent if parent in self.parent else None
        if block not in self.used:
            self.uncached_stack = [other for other in self.uncached_stack if other != block]
            self._touch([block])

    def uncache(self, block: int) -> None:
        if block in self.parent:
            self._forget(block)
            if block not in self.used:
                self.uncached_stack.append(block)

    def unpin(self, block: int) -> None:
        self.pins[block] -= 1
        if block in self.free_cached():
            self._touch([block])

    def _touch(self, blocks: list[int]) -> None:
        self.num_calls += 1
        self.touched_at |= {block: (self.num_calls, place) for place, block in enumerate(blocks)}
        self.marked |= set(blocks)
        self.touched_this_step |= set(blocks)

    def _forget(self, gone: int) -> None:
        self.marked.discard(gone)
        self.touched_this_step.discard(gone)
        self.parent = {block: None if p == gone else p for block, p in self.parent.items() if block != gone}
