"""RLT, randomized leaf token eviction: a free list over block ids behind `eviction.FreeBlocks`.

A block is marked when it is touched, and evicted is a uniform draw among the unmarked leaves (free, cached, nothing
needs them to stay). When none is left a new phase begins: all marks are cleared, except of the blocks touched in this
very step. A used block is being touched all the time, so it is marked when it is released. A pinned block counts as
touched all the time as well. Only leaves go, so a cached chain never has a hole. Source: the house design, "The
algorithms".

Cost: O(1) a block. A block is marked while `touched >= phase`, so clearing all marks is moving `phase`; a new phase
costs O(leaves of this step).
"""

from collections.abc import Iterable, Sequence
from random import Random

from serve_app.policies.forest import BlockForest, Node, lift


class RltFreeBlocks(BlockForest):
    """Randomized leaf token eviction. The draws come from `rng`, so a seed repeats them."""

    def __init__(self, num_blocks: int, free: Iterable[int], rng: Random) -> None:
        super().__init__(num_blocks)
        self._random = rng.random
        self._phase = 0
        self._step = num_blocks
        """What is touched in this step is touched at this time or later."""
        self._unmarked: list[Node] = []
        self._marked: list[Node] = []
        self._marked_this_step: list[Node] = []
        """They were leaves when they were touched, and may be none any more."""
        self.release(free)

    def begin_step(self) -> None:
        self._step = self._clock + len(self._nodes)
        self._marked_this_step.clear()

    def observe(self, chain: Sequence[bytes]) -> None:
        """RLT learns nothing."""

    def take(self, num: int) -> list[int]:
        taken = self._take_uncached(num)
        random, pile = self._random, self._unmarked
        num_evicted = num - len(taken)
        for _ in range(num_evicted):
            if not pile:
                self._start_phase()
                pile = self._unmarked
                if not pile:
                    taken.append(self._evict_needed())
                    pile = self._unmarked
                    continue
            place = int(random() * len(pile))
            node = pile[place]
            taken.append(node.block)
            node.free = node.cached = False
            parent, node.parent, node.pile = node.parent, None, None
            if parent is not None:
                parent.children -= 1
                if parent.free and not parent.children:
                    if parent.touched < self._phase:
                        # The parent is the leaf now, in its child's place.
                        pile[place], parent.pile, parent.place = parent, pile, place
                        continue
                    self._lay(parent)
            last = pile.pop()
            if last is not node:
                pile[place], last.place = last, place
        self.num_free -= num
        self._num_cached -= num_evicted
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        nodes = self._nodes
        self._clock = clock = self._clock + len(nodes)
        uncached, num, pile, marked = [], 0, self._marked, self._marked_this_step
        try:
            for block in blocks:
                node = nodes[block]
                if node.free:
                    raise ValueError(f"block {block} is already free")
                node.free = True
                num += 1
                node.touched = clock
                if not node.cached:
                    uncached.append(node)
                elif not node.children:
                    node.pile, node.place = pile, len(pile)
                    pile.append(node)
                    marked.append(node)
        finally:
            self.num_free += num
            self._stack(uncached)

    def _start_phase(self) -> None:
        """Clear all marks but those made in this step; nothing happens without leaves."""
        if not self._marked:
            return
        self._phase = self._step
        self._unmarked, self._marked = self._marked, self._unmarked
        marked_this_step, self._marked_this_step = self._marked_this_step, []
        for node in marked_this_step:
            if node.pile is self._unmarked and node.touched >= self._phase:
                lift(node)
                self._put(node)
        if not self._unmarked:
            # Every leaf was just touched, and one of them has to go.
            self.begin_step()
            self._start_phase()

    def _lay(self, node: Node) -> None:
        self._put(node)

    def _put(self, node: Node) -> None:
        """Put a leaf that is in no pile where it belongs."""
        pile = self._unmarked
        if node.touched >= self._phase:
            pile = self._marked
            if node.touched >= self._step:
                self._marked_this_step.append(node)
        node.pile, node.place = pile, len(pile)
        pile.append(node)

    def _cached_order(self) -> list[Node]:
        rest = [node for node in self._nodes if node.free and node.cached and node.pile is None]
        return [*self._unmarked, *self._marked, *rest]

    def _choice(self, nodes: list[Node]) -> Node:
        return nodes[int(self._random() * len(nodes))]

    def _check_leaves(self, leaves: set[Node]) -> None:
        unmarked, marked = set(self._unmarked), set(self._marked)
        assert unmarked | marked == leaves
        assert all(node.touched < self._phase for node in unmarked)
        assert all(node.touched >= self._phase for node in marked)
        assert {node for node in marked if node.touched >= self._step} <= set(self._marked_this_step)
        assert all(node.touched >= self._step for node in self._marked_this_step)
