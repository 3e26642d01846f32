"""A pool's blocks and the forest that the cached ones form: what every free list keeps, whatever goes first.

A block is exactly one of: used; free and uncached (its content is worth nothing); free and cached (a later request may
hit it). A cached block knows the block before it in its chain, its parent. A leaf is a cached block that nothing needs
to stay: it has no cached child and no pin. Free lists evict leaves, so a cached chain never has a hole; a policy says
which leaf. Source: ours. Cost: O(1) a block for all that is here, but where a method says otherwise.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence


class Node:
    """One block. A block that loses its content while it has cached children gets a new node: theirs is dead."""

    __slots__ = ("block", "cached", "children", "free", "parent", "pile", "place", "touched")

    def __init__(self, block: int) -> None:
        self.block = block
        self.free = False
        self.cached = False
        self.parent: Node | None = None
        self.children = 0
        """What needs the block to stay: its cached children, and one for each pin."""
        self.touched = 0
        """When it was released or unpinned last: a multiple of the number of blocks, growing with each."""
        self.pile: list[Node] | None = None
        """The list that it lies in, if any, at index `place`."""
        self.place = 0


class BlockForest(ABC):
    """The base of the free lists. A policy adds `take`, `release` and how it keeps its leaves."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks are used; `release` those that are free."""
        self.num_free = 0
        self.num_orphanings = 0
        self._nodes = [Node(block) for block in range(num_blocks)]
        self._uncached: list[Node] = []
        """A stack: the last released goes first, as its memory is warm."""
        self._num_cached = 0
        self._pins: dict[int, int] = {}
        self._clock = 0
        """The latest `touched`; multiples of the number of blocks, so that a block's id can be added to one."""

    @abstractmethod
    def begin_step(self) -> None:
        """As in `FreeBlocks`."""

    @abstractmethod
    def observe(self, chain: Sequence[bytes]) -> None:
        """As in `FreeBlocks`."""

    @abstractmethod
    def take(self, num: int) -> list[int]:
        """As in `FreeBlocks`."""

    @abstractmethod
    def release(self, blocks: Iterable[int]) -> None:
        """As in `FreeBlocks`."""

    @abstractmethod
    def _lay(self, node: Node) -> None:
        """`node`, free and cached, has become a leaf."""

    @abstractmethod
    def _cached_order(self) -> list[Node]:
        """The free cached blocks, those that go sooner in front as far as the policy knows. O(blocks x log)."""

    @abstractmethod
    def _choice(self, nodes: list[Node]) -> Node:
        """Which of `nodes`, one or more, to evict when none of them is a leaf."""

    @abstractmethod
    def _check_leaves(self, leaves: set[Node]) -> None:
        """Assert that what the policy keeps are `leaves`: all free cached blocks that nothing needs to stay."""

    def take_over(self, before: "BlockForest") -> None:
        """Hold what `before` holds, but its pins; called first. `before` is not changed. O(blocks)."""
        self._clock, self._num_cached = before._clock, before._num_cached
        for node, old in zip(self._nodes, before._nodes, strict=True):
            node.cached, node.touched = old.cached, old.touched
            if old.parent is not None and before._nodes[old.parent.block] is old.parent:
                node.parent = self._nodes[old.parent.block]
                node.parent.children += 1
        free = [self._nodes[block] for block in before.free_blocks()]
        self.num_free = len(free)
        for node in free:
            node.free = True
        self._stack([node for node in free if not node.cached])
        for node in free:
            if node.cached and not node.children:
                self._lay(node)
        self.begin_step()

    def claim(self, block: int) -> None:
        node = self._nodes[block]
        if not node.free:
            raise ValueError(f"block {block} is not free")
        node.free = False
        self.num_free -= 1
        if node.pile is not None:
            lift(node)

    def cache(self, block: int, parent: int | None) -> None:
        self.uncache(block)
        node = self._nodes[block]
        above = None if parent is None else self._nodes[parent]
        if above is not None and above.cached:
            node.parent = above
            above.children += 1
            if above.pile is not None:
                lift(above)
        node.cached = True
        self._num_cached += 1
        if node.free:
            lift(node)
            self._touch(node)
            if not node.children:
                self._lay(node)

    def cache_chain(self, blocks: Iterable[int], parent: int | None) -> None:
        nodes, num_cached = self._nodes, 0
        above = None if parent is None else nodes[parent]
        if above is not None and not above.cached:
            above = None
        for block in blocks:
            node = nodes[block]
            if node.cached or node.free:
                self.cache(block, None if above is None else above.block)
                above = nodes[block]
                continue
            node.cached = True
            num_cached += 1
            if above is not None:
                node.parent = above
                above.children += 1
                if above.pile is not None:
                    lift(above)
            above = node
        self._num_cached += num_cached

    def uncache(self, block: int) -> None:
        node = self._nodes[block]
        if not node.cached:
            return
        if node.pile is not None:
            lift(node)
        self._forget(node)
        self._num_cached -= 1
        if (node := self._nodes[block]).free:
            self._stack([node])

    def pin(self, block: int) -> None:
        node = self._nodes[block]
        self._pins[block] = self._pins.get(block, 0) + 1
        node.children += 1
        if node.cached and node.pile is not None:
            lift(node)

    def unpin(self, block: int) -> None:
        if block not in self._pins:
            raise ValueError(f"block {block} is not pinned")
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
        node = self._nodes[block]
        node.children -= 1
        if node.free and node.cached:
            self._touch(node)
            if not node.children:
                self._lay(node)

    def is_free(self, block: int) -> bool:
        return self._nodes[block].free

    def is_cached(self, block: int) -> bool:
        return self._nodes[block].cached

    def free_blocks(self) -> list[int]:
        return [node.block for node in (*reversed(self._uncached), *self._cached_order())]

    def _touch(self, node: Node) -> None:
        self._clock += len(self._nodes)
        node.touched = self._clock

    def _stack(self, nodes: list[Node]) -> None:
        """Lay free uncached blocks onto the stack, the first of them on top."""
        pile = self._uncached
        for node in reversed(nodes):
            node.pile, node.place = pile, len(pile)
            pile.append(node)

    def _take_uncached(self, num: int) -> list[int]:
        """Up to `num` blocks off the stack. Raises ValueError when fewer than `num` are free at all."""
        if num > self.num_free:
            raise ValueError(f"{num} blocks asked for, {self.num_free} are free")
        pile = self._uncached
        if not pile or not num:
            return []
        nodes = pile[-num:]
        del pile[-num:]
        for node in nodes:
            node.free, node.pile = False, None
        return [node.block for node in reversed(nodes)]

    def _evict_needed(self) -> int:
        """Evict where no leaf is free: a pinned block without cached children, else any.

        What is free besides are ancestors of pinned blocks and, through duplicates of themselves, of used ones.
        O(pins), and O(blocks) where no free block is pinned. A pinned block costs this once: its ancestors are leaves
        then.
        """
        pinned = ((self._nodes[block], count) for block, count in self._pins.items())
        candidates = [node for node, count in pinned if node.free and node.cached and node.children == count]
        node = self._choice(candidates or [node for node in self._nodes if node.free])
        node.free = False
        self._forget(node)
        return node.block

    def _forget(self, node: Node) -> None:
        """End a block's cached life: it leaves its parent, and its children have none."""
        parent, node.parent, node.cached = node.parent, None, False
        if parent is not None:
            parent.children -= 1
            if parent.free and not parent.children:
                self._lay(parent)
        num_pins = self._pins.get(node.block, 0)
        if node.children > num_pins:
            self.num_orphanings += 1
            fresh = self._nodes[node.block] = Node(node.block)
            fresh.free, fresh.children, fresh.touched = node.free, num_pins, node.touched
            node.free = False

    def check_integrity(self) -> None:
        """Assert the conservation law, the links between blocks, and what the policy keeps. O(blocks)."""
        nodes = self._nodes
        assert all(node.block == block for block, node in enumerate(nodes))
        uncached = {node for node in nodes if node.free and not node.cached}
        num_used = sum(not node.free for node in nodes)
        num_free_cached = sum(node.free and node.cached for node in nodes)
        assert num_used + len(uncached) + num_free_cached == len(nodes)
        assert self.num_free == len(uncached) + num_free_cached
        assert self._num_cached == sum(node.cached for node in nodes)
        assert set(self._uncached) == uncached
        piles = {id(node.pile): node.pile for node in nodes if node.pile is not None}
        assert all(node.pile is pile and node.place == i for pile in piles.values() for i, node in enumerate(pile))
        needed_by = dict(self._pins)
        for node in nodes:
            assert node.cached or node.parent is None
            if node.parent is not None and nodes[node.parent.block] is node.parent:
                assert node.parent.cached
                needed_by[node.parent.block] = needed_by.get(node.parent.block, 0) + 1
        assert all(node.children == needed_by.get(node.block, 0) for node in nodes)
        self._check_leaves({node for node in nodes if node.free and node.cached and not node.children})


def lift(node: Node) -> None:
    """Take a block out of its pile; the pile's last block fills the gap."""
    pile = node.pile
    assert pile is not None
    node.pile = None
    last = pile.pop()
    if last is not node:
        pile[node.place] = last
        last.place = node.place
