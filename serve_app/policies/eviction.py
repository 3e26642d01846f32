"""Which KV block to reuse next: free lists over block ids behind one interface, and LRU.

Every free list hands out uncached free blocks before it evicts a cached one, evicts only leaves of the forest of cached
blocks (see `forest`), and spares what is pinned. RLT is in `rlt`, the choice between the two in `adaptive`.

LRU evicts the leaf that was released longest ago: argmin over leaves of `touched`. A parent is released after its child
and with it, so without pins this is vLLM's own order. Source: vLLM's free queue; leaves and pins are ours.

Cost: O(log leaves) for a chain, which is one leaf, and O(1) for each further block of it.
"""

from collections.abc import Iterable, Sequence
from heapq import heappush
from typing import Protocol

from serve_app.policies.forest import BlockForest, Node
from serve_app.policies.leaf_heap import LeafHeap


class FreeBlocks(Protocol):
    """A pool's free list. Blocks are ids from 0 to num_blocks - 1."""

    num_free: int
    """Free blocks, cached or not."""

    num_orphanings: int
    """Times that a block lost its content before the blocks that continue it: only when asked to uncache it, or when
    nothing else was free."""

    def begin_step(self) -> None:
        """A new engine step begins: what was touched until now is no longer "just touched"."""

    def observe(self, chain: Sequence[bytes]) -> None:
        """A request is admitted for the first time; `chain`: the hashes of its full prompt blocks, its root first."""

    def take(self, num: int) -> list[int]:
        """Put `num` free blocks to use, in eviction's order, uncached. Raises ValueError when fewer are free."""

    def claim(self, block: int) -> None:
        """Put one particular free block to use, as it is: a prefix hit. Raises ValueError unless it is free."""

    def release(self, blocks: Iterable[int]) -> None:
        """Free used blocks, those to go first in front. Raises ValueError when one is free already."""

    def cache(self, block: int, parent: int | None) -> None:
        """`block` now holds a reusable piece of a chain, after `parent`; a parent that isn't cached counts as none."""

    def cache_chain(self, blocks: Iterable[int], parent: int | None) -> None:
        """`cache` for each, the first after `parent` and each of the others after the one before it."""

    def uncache(self, block: int) -> None:
        """What `block` holds is worth nothing any more; nothing happens unless it is cached."""

    def pin(self, block: int) -> None:
        """Keep `block`, free or used, once more: it counts as just used until it is unpinned as often.

        A pinned block is evicted only when each free block is pinned, or has a cached descendant that is pinned or
        used. The pin is the block's, whatever happens to what it holds.
        """

    def unpin(self, block: int) -> None:
        """Undo one `pin`; the block counts as used this moment. Raises ValueError when it is not pinned."""

    def is_free(self, block: int) -> bool:
        """Whether `block` is not in use."""

    def is_cached(self, block: int) -> bool:
        """Whether `block` holds a piece of a chain, in use or not."""

    def free_blocks(self) -> list[int]:
        """All free blocks, sooner reused first as far as the policy knows."""

    def check_integrity(self) -> None:
        """Assert the conservation law: each block is exactly one of used, free and uncached, free and cached."""


class LruFreeBlocks(BlockForest):
    """Least recently released leaf first; uncached blocks before, the last released of them in front."""

    def __init__(self, num_blocks: int, free: Iterable[int]) -> None:
        super().__init__(num_blocks)
        self._leaves = LeafHeap(self._nodes)
        self.release(free)

    def begin_step(self) -> None:
        """LRU knows no steps."""

    def observe(self, chain: Sequence[bytes]) -> None:
        """LRU learns nothing."""

    def take(self, num: int) -> list[int]:
        taken = self._take_uncached(num)
        pop_oldest, entries = self._leaves.pop_oldest, self._leaves.entries
        next_node: Node | None = None
        num_evicted = num - len(taken)
        for _ in range(num_evicted):
            node = next_node or pop_oldest()
            next_node = None
            if node is None:
                taken.append(self._evict_needed())
                continue
            taken.append(node.block)
            node.free = node.cached = False
            parent, node.parent = node.parent, None
            if parent is not None:
                parent.children -= 1
                if parent.free and not parent.children:
                    # A chain goes from its end to its root without a detour through the heap.
                    if entries and entries[0] < parent.touched:
                        heappush(entries, parent.touched + parent.block)
                    else:
                        next_node = parent
        if next_node is not None:
            heappush(entries, next_node.touched + next_node.block)
        self.num_free -= num
        self._num_cached -= num_evicted
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        nodes, entries, num_blocks, clock = self._nodes, self._leaves.entries, len(self._nodes), self._clock
        uncached, num = [], 0
        try:
            for block in blocks:
                node = nodes[block]
                if node.free:
                    raise ValueError(f"block {block} is already free")
                node.free = True
                num += 1
                clock += num_blocks
                node.touched = clock
                if not node.cached:
                    uncached.append(node)
                elif not node.children:
                    heappush(entries, clock + block)
        finally:
            self.num_free += num
            self._clock = clock
            self._stack(uncached)
            self._leaves.tidy()

    def _lay(self, node: Node) -> None:
        self._leaves.push(node)

    def _cached_order(self) -> list[Node]:
        return sorted((node for node in self._nodes if node.free and node.cached), key=lambda node: node.touched)

    def _choice(self, nodes: list[Node]) -> Node:
        return min(nodes, key=lambda node: node.touched)

    def _check_leaves(self, leaves: set[Node]) -> None:
        self._leaves.check_integrity(leaves)
