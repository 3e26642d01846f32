"""Which KV block to reuse next: free lists over block ids behind one interface, and LRU.

A block is exactly one of: used; free and uncached (its content is worth nothing); free and cached (a later request may
hit it). A cached block knows the block before it in its chain, its parent, so the cached blocks form a forest. Every
free list hands out uncached free blocks before it evicts a cached one. RLT is in `rlt`.

LRU evicts the block that was released, or touched, longest ago. Source: vLLM's own free queue. Cost: O(1) a block.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile
from typing import Protocol


class FreeBlocks(Protocol):
    """A pool's free list. Blocks are ids from 0 to num_blocks - 1."""

    @property
    def num_free(self) -> int:
        """Free blocks, cached or not."""

    def begin_step(self) -> None:
        """A new engine step begins: what was touched until now is no longer "just touched"."""

    def take(self, num: int) -> list[int]:
        """Put `num` free blocks to use, in eviction's order, uncached. Raises ValueError when fewer are free."""

    def claim(self, block: int) -> None:
        """Put one particular free block to use, as it is: a prefix hit. Raises ValueError unless it is free."""

    def release(self, blocks: Iterable[int]) -> None:
        """Free used blocks, those to go first in front. Raises ValueError when one is free already."""

    def touch(self, blocks: Iterable[int]) -> None:
        """Count cached free blocks as just used though nobody uses them, those to go first in front; the caller names
        only such blocks. Raises ValueError when one is used or uncached."""

    def cache(self, block: int, parent: int | None) -> None:
        """`block` now holds a reusable piece of a chain, after `parent`; a parent that isn't cached counts as none."""

    def uncache(self, block: int) -> None:
        """What `block` holds is worth nothing any more; nothing happens unless it is cached."""

    def is_free(self, block: int) -> bool:
        """Whether `block` is not in use."""

    def is_cached(self, block: int) -> bool:
        """Whether `block` holds a piece of a chain, in use or not."""

    def free_blocks(self) -> list[int]:
        """All free blocks, sooner reused first as far as the policy knows."""

    def check_integrity(self) -> None:
        """Assert the conservation law: each block is exactly one of used, free and uncached, free and cached."""


class LruFreeBlocks:
    """Least recently released first; uncached blocks first, the last released of them in front (vLLM's own order)."""

    def __init__(self, num_blocks: int, free: Iterable[int]) -> None:
        self._num_blocks = num_blocks
        self._queue: OrderedDict[int, None] = OrderedDict.fromkeys(free)
        self._cached: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._queue)

    def begin_step(self) -> None:
        """LRU has no marks."""

    def take(self, num: int) -> list[int]:
        check_enough(num, self.num_free)
        taken = [self._queue.popitem(last=False)[0] for _ in range(num)]
        self._cached.difference_update(taken)
        return taken

    def claim(self, block: int) -> None:
        if block not in self._queue:
            raise ValueError(f"block {block} is not free")
        del self._queue[block]

    def release(self, blocks: Iterable[int]) -> None:
        uncached = []
        for block in blocks:
            if block in self._queue:
                raise ValueError(f"block {block} is already free")
            self._queue[block] = None
            if block not in self._cached:
                uncached.append(block)
        for block in reversed(uncached):
            self._queue.move_to_end(block, last=False)

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            check_touchable(self, block)
            self._queue.move_to_end(block)

    def cache(self, block: int, parent: int | None) -> None:
        self._cached.add(block)

    def uncache(self, block: int) -> None:
        self._cached.discard(block)

    def is_free(self, block: int) -> bool:
        return block in self._queue

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def free_blocks(self) -> list[int]:
        return list(self._queue)

    def check_integrity(self) -> None:
        assert {*self._queue, *self._cached} <= set(range(self._num_blocks))


def touch_order(chains: Iterable[Iterable[int]]) -> list[int]:
    """In which order to touch the blocks of several chains, so that the least valuable of them goes first.

    chains: one a request, the most important first; each from its deepest block up. Chains that share a block share
    all its ancestors, so one is read only up to the first block that is known already.
    Returns: each block once, after its descendants; blocks that the first chain needs come last. O(blocks).
    """
    seen: set[int] = set()
    parts: list[list[int]] = []
    for chain in chains:
        parts.append(list(takewhile(lambda block: block not in seen, chain)))
        seen.update(parts[-1])
    return [block for part in reversed(parts) for block in part]


def check_enough(num: int, num_free: int) -> None:
    """Raises ValueError when more blocks are asked for than are free."""
    if num > num_free:
        raise ValueError(f"{num} blocks asked for, {num_free} are free")


def check_touchable(free: FreeBlocks, block: int) -> None:
    """Raises ValueError unless `block` is free and cached."""
    if not (free.is_free(block) and free.is_cached(block)):
        raise ValueError(f"block {block} is not both free and cached")
