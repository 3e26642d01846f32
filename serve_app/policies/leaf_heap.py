"""The leaves of a forest by when they were touched: which of them was touched longest ago?

A heap of `touched + block`, which says both. A leaf that is none any more, or was touched since, stays in it as
an entry that doesn't hold. Cost: O(log leaves) a push or pop, and entries that don't hold are at most half of the heap,
amortized. Source: heaps with lazy deletion (the notes of Python's `heapq`).
"""

from heapq import heapify, heappop, heappush

from serve_app.policies.forest import Node

_LEAST_LIMIT = 64


class LeafHeap:
    """Push each block that becomes a leaf, and each leaf that is touched."""

    def __init__(self, nodes: list[Node]) -> None:
        """Args: nodes: by block id; a block's node may be exchanged in it."""
        self.entries: list[int] = []
        self._nodes = nodes
        self._limit = _LEAST_LIMIT

    def push(self, node: Node) -> None:
        heappush(self.entries, node.touched + node.block)
        if len(self.entries) > self._limit:
            self.tidy()

    def pop_oldest(self) -> Node | None:
        """Take out the leaf that was touched longest ago; None without leaves."""
        nodes, entries, num_blocks = self._nodes, self.entries, len(self._nodes)
        while entries:
            entry = heappop(entries)
            block = entry % num_blocks
            node = nodes[block]
            if node.touched == entry - block and node.free and not node.children and node.cached:
                return node
        return None

    def tidy(self) -> None:
        """Throw the entries away that don't hold, once they may be half of the heap. O(entries)."""
        if len(self.entries) > self._limit:
            self.entries[:] = self.leaf_entries()
            heapify(self.entries)
            self._limit = max(_LEAST_LIMIT, 2 * len(self.entries))

    def leaf_entries(self) -> set[int]:
        """The entries that hold."""
        nodes = self._nodes
        found = ((entry, nodes[entry % len(nodes)]) for entry in self.entries)
        leaves = ((entry, node) for entry, node in found if node.free and node.cached and not node.children)
        return {entry for entry, node in leaves if node.touched + node.block == entry}

    def check_integrity(self, leaves: set[Node]) -> None:
        """Assert that the entries that hold are those of `leaves`, and that the others are not too many."""
        assert self.leaf_entries() == {node.touched + node.block for node in leaves}
        assert len(self.entries) <= self._limit
