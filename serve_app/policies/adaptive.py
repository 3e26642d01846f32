"""The better of LRU and RLT, whichever it is at the time: a free list behind `eviction.FreeBlocks`.

Each eviction is LRU's choice with probability `share` and RLT's otherwise; `share` follows the lead of LRU over RLT in
two shadow caches (see `shadow`). Both orders are kept over the same blocks, so the pool can follow either at any time.
Where neither leads, half of each: where the two differ by a point, no choice is more than half a point behind. Source:
ours; LeCaR (Vietri et al., HotStorage 2018) mixes LRU and LFU by weights that it learns from its own regret.

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
        """Args: duel: what decides the share of LRU; None makes one for this pool."""
        super().__init__(num_blocks, (), rng)
        self._duel = duel if duel is not None else Duel(num_blocks, Random(rng.getrandbits(64)))
        self._leaves = LeafHeap(self._nodes)
        self.release(free)

    @property
    def lru_share(self) -> float:
        """Share of the evictions that LRU chooses."""
        return self._duel.lru_share()

    def observe(self, chain: Sequence[bytes]) -> None:
        self._duel.observe(chain)

    def take(self, num: int) -> list[int]:
        taken = self._take_uncached(num)
        random, share, entries, pop_oldest = self._random, self.lru_share, self._leaves.entries, self._leaves.pop_oldest
        for _ in range(num - len(taken)):
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
