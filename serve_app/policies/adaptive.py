"""The better of LRU and RLT, whichever it is at the time: a free list behind `eviction.FreeBlocks`.

Each eviction is LRU's choice with probability `share` and RLT's otherwise; `share` follows the lead of LRU over RLT in
two shadow caches (see `shadow`). It is 0 until LRU leads, and so is this RLT draw for draw. Both orders are kept over
the same blocks, so the pool can follow either at any time. A mixture, as a cache shows only much later what it should
have kept: where the two differ by a point, half of each is seldom more than half a point behind either. Source: ours;
LeCaR (Vietri et al., "Driving cache replacement with ML-based LeCaR", HotStorage 2018) mixes LRU and LFU by weights
that it learns from its own regret.

Cost: as RLT's, and O(log leaves) a block for LRU's order; `observe` as in `shadow`.
"""

from collections.abc import Iterable, Sequence
from heapq import heappush
from random import Random

from serve_app.policies.forest import Node
from serve_app.policies.leaf_heap import LeafHeap
from serve_app.policies.rlt import RltFreeBlocks
from serve_app.policies.shadow import Duel


class AdaptiveFreeBlocks(RltFreeBlocks):
    """A mixture of LRU and RLT. All draws come from `rng`, so a seed and what is observed repeat them."""

    def __init__(self, num_blocks: int, free: Iterable[int], rng: Random, duel: Duel | None = None) -> None:
        """Args: duel: what decides the share of LRU; None makes one for this pool, which draws nothing from `rng`."""
        super().__init__(num_blocks, (), rng)
        self._duel = duel if duel is not None else Duel(num_blocks, Random(0))
        self._leaves = LeafHeap(self._nodes)
        self.release(free)

    @property
    def lru_share(self) -> float:
        """Share of the evictions that LRU chooses."""
        return self._duel.lru_share()

    def observe(self, chain: Sequence[bytes]) -> None:
        # An uncached block in use has no place in the shadows.
        self._duel.observe(chain, len(self._uncached) + self._num_cached)

    def take(self, num: int) -> list[int]:
        taken = self._take_uncached(num)
        random, share, entries, pop_oldest = self._random, self.lru_share, self._leaves.entries, self._leaves.pop_oldest
        num_evicted = num - len(taken)
        for _ in range(num_evicted):
            if share and random() < share:
                node = pop_oldest()
            else:
                if not self._unmarked:
                    self._start_phase()
                pile = self._unmarked
                node = pile[int(random() * len(pile))] if pile else None
            if node is None:
                taken.append(self._evict_needed())
                continue
            home, place = node.pile, node.place
            assert home is not None
            taken.append(node.block)
            node.free = node.cached = False
            parent, node.parent, node.pile = node.parent, None, None
            if parent is not None:
                parent.children -= 1
                if parent.free and not parent.children:
                    heappush(entries, parent.touched + parent.block)
                    if parent.touched < self._phase and home is self._unmarked:
                        home[place], parent.pile, parent.place = parent, home, place
                        continue
                    self._put(parent)
            last = home.pop()
            if last is not node:
                home[place], last.place = last, place
        self.num_free -= num
        self._num_cached -= num_evicted
        self._leaves.tidy()
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        num_marked = len(self._marked_this_step)
        try:
            super().release(blocks)
        finally:
            for node in self._marked_this_step[num_marked:]:
                self._leaves.push(node)

    def _lay(self, node: Node) -> None:
        self._put(node)
        self._leaves.push(node)

    def _choice(self, nodes: list[Node]) -> Node:
        share = self.lru_share
        if share and self._random() < share:
            return min(nodes, key=lambda node: node.touched)
        return super()._choice(nodes)

    def _check_leaves(self, leaves: set[Node]) -> None:
        super()._check_leaves(leaves)
        self._leaves.check_integrity(leaves)
