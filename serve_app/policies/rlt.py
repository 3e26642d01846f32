"""RLT, randomized leaf token eviction: a free list over block ids behind `eviction.FreeBlocks`.

A block is marked when it is touched, and evicted is a uniform draw among the unmarked leaves (free, cached, no cached
child). When none is left a new phase begins: all marks are cleared, except of the blocks touched in this very step. A
used block is being touched all the time, so it is marked when it is released. Only leaves go, so a cached chain never
has a hole. Source: the house design, "The algorithms".

Cost: O(1) a block. A mark is its phase's number, so clearing all is counting up; a phase costs O(the step's marks).
"""

from collections.abc import Iterable
from random import Random

from serve_app.policies.eviction import check_enough, check_touchable

_USED, _UNCACHED, _LEAVES_A, _LEAVES_B, _INNER = range(5)
_NO_BLOCK = -1


class RltFreeBlocks:
    """Randomized leaf token eviction. The draws come from `rng`, so a seed repeats them."""

    def __init__(self, num_blocks: int, free: Iterable[int], rng: Random) -> None:
        self.num_free = 0
        self._random = rng.random
        self._phase = 1
        # One of the two leaf piles holds the unmarked ones; a new phase exchanges their roles.
        self._unmarked, self._marked = _LEAVES_A, _LEAVES_B
        self._piles: list[list[int]] = [[] for _ in range(5)]
        self._pile_of = bytearray(num_blocks)
        self._place_in_pile = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        self._marked_in_phase = [0] * num_blocks
        self._num_children = [0] * num_blocks
        # A block lives once for each time that it is cached; a link holds while its parent is in the life it names.
        self._life = [0] * num_blocks
        self._parent = [_NO_BLOCK] * num_blocks
        self._parent_life = [0] * num_blocks
        self._touched_this_step: list[int] = []
        self.release(free)

    def begin_step(self) -> None:
        self._touched_this_step.clear()

    def take(self, num: int) -> list[int]:
        check_enough(num, self.num_free)
        taken = []
        for _ in range(num):
            block = self._next_block()
            self._lift(block)
            self._forget(block)
            taken.append(block)
        self.num_free -= num
        return taken

    def claim(self, block: int) -> None:
        if self._pile_of[block] == _USED:
            raise ValueError(f"block {block} is not free")
        self._lift(block)
        self.num_free -= 1

    def release(self, blocks: Iterable[int]) -> None:
        # Backwards, as the uncached pile is a stack and the first block is to be on top.
        for block in reversed(list(blocks)):
            if self._pile_of[block] != _USED:
                raise ValueError(f"block {block} is already free")
            if self._cached[block]:
                self._mark(block)
            self._lay(block)
            self.num_free += 1

    def touch(self, blocks: Iterable[int]) -> None:
        """As in `FreeBlocks`; ancestors need no touch, as none is a leaf while the block is cached."""
        for block in blocks:
            check_touchable(self, block)
            self._mark(block)
            self._relay(block)

    def cache(self, block: int, parent: int | None) -> None:
        self.uncache(block)
        if parent is not None and self._cached[parent]:
            self._parent[block], self._parent_life[block] = parent, self._life[parent]
            self._num_children[parent] += 1
            if self._num_children[parent] == 1:
                self._relay(parent)
        self._cached[block] = True
        if self._pile_of[block] != _USED:
            self._mark(block)
            self._relay(block)

    def uncache(self, block: int) -> None:
        if self._cached[block]:
            self._forget(block)
            self._relay(block)

    def is_free(self, block: int) -> bool:
        return self._pile_of[block] != _USED

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def free_blocks(self) -> list[int]:
        piles = self._piles
        return [*reversed(piles[_UNCACHED]), *piles[self._unmarked], *piles[self._marked], *piles[_INNER]]

    def _next_block(self) -> int:
        """The block to reuse next; some block is free."""
        if self._piles[_UNCACHED]:
            return self._piles[_UNCACHED][-1]
        if not self._piles[self._unmarked]:
            self._start_phase()
        # Without any leaf, what is free are parents whose descendants are all in use (through duplicates of these
        # parents, or touched one by one): any of them may go.
        pile = self._piles[self._unmarked] or self._piles[_INNER]
        return pile[int(self._random() * len(pile))]

    def _start_phase(self) -> None:
        """Clear all marks but those made in this step; nothing happens without leaves."""
        if not self._piles[self._marked]:
            return
        self._phase += 1
        self._unmarked, self._marked = self._marked, self._unmarked
        for block in self._touched_this_step:
            self._marked_in_phase[block] = self._phase
            self._relay(block)
        if not self._piles[self._unmarked]:
            # Every leaf was just touched, and one of them has to go.
            self._touched_this_step.clear()
            self._start_phase()

    def _mark(self, block: int) -> None:
        self._marked_in_phase[block] = self._phase
        self._touched_this_step.append(block)

    def _forget(self, block: int) -> None:
        """End the block's cached life, if it is in one: it leaves its parent, and its children have none."""
        if not self._cached[block]:
            return
        self._cached[block] = False
        self._life[block] += 1
        self._num_children[block] = 0
        parent = self._parent_of(block)
        self._parent[block] = _NO_BLOCK
        if parent != _NO_BLOCK:
            self._num_children[parent] -= 1
            if self._num_children[parent] == 0:
                self._relay(parent)

    def _parent_of(self, block: int) -> int:
        parent = self._parent[block]
        return parent if parent != _NO_BLOCK and self._parent_life[block] == self._life[parent] else _NO_BLOCK

    def _pile_for(self, block: int) -> int:
        if not self._cached[block]:
            return _UNCACHED
        if self._num_children[block]:
            return _INNER
        return self._marked if self._marked_in_phase[block] == self._phase else self._unmarked

    def _lay(self, block: int) -> None:
        """Put a block that is in no pile where it belongs."""
        which = self._pile_for(block)
        pile = self._piles[which]
        self._pile_of[block], self._place_in_pile[block] = which, len(pile)
        pile.append(block)

    def _lift(self, block: int) -> None:
        """Take a free block out of its pile; the pile's last block fills the gap."""
        pile, place = self._piles[self._pile_of[block]], self._place_in_pile[block]
        last = pile.pop()
        self._pile_of[block] = _USED
        if last != block:
            pile[place], self._place_in_pile[last] = last, place

    def _relay(self, block: int) -> None:
        if self._pile_of[block] != _USED:
            self._lift(block)
            self._lay(block)

    def check_integrity(self) -> None:
        for which, pile in enumerate(self._piles):
            assert all(self._pile_of[b] == which and self._place_in_pile[b] == i for i, b in enumerate(pile))
        num_laid = sum(len(pile) for pile in self._piles)
        assert num_laid == self.num_free == sum(which != _USED for which in self._pile_of)
        assert not self._piles[_USED]
        assert not any(self._cached[b] for b in self._piles[_UNCACHED])
        self._check_forest()

    def _check_forest(self) -> None:
        """Children counted anew, the leaves found anew, marks as the phase says."""
        cached = [block for block in range(len(self._cached)) if self._cached[block]]
        children = [0] * len(self._cached)
        for block in cached:
            if (parent := self._parent_of(block)) != _NO_BLOCK:
                assert self._cached[parent]
                children[parent] += 1
        assert children == self._num_children
        free = [block for block in cached if self._pile_of[block] != _USED]
        unmarked, marked = set(self._piles[self._unmarked]), set(self._piles[self._marked])
        assert unmarked | marked == {block for block in free if children[block] == 0}
        assert set(self._piles[_INNER]) == {block for block in free if children[block] > 0}
        assert all(self._marked_in_phase[block] == self._phase for block in marked)
        assert all(self._marked_in_phase[block] < self._phase for block in unmarked)
