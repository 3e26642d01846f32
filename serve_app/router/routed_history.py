"""Which KV blocks were ever routed to each replica: what cache-aware routers go by in place of the engines' KV events.

It says nothing of what a replica still holds: neither an eviction nor a restart under the same id is noticed, as in the
routers that it stands in for. Cost: O(blocks + n) a decision for n candidates.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from hashlib import blake2b

from serve_app.router.choice import ReplicaView
from serve_app.router.prefix_index import PrefixIndex


class RoutedHistory:
    """Distinct blocks by replica, each as long as it stays under the cap and its replica is there."""

    def __init__(self, max_blocks: int) -> None:
        """Args: max_blocks: cap on (replica, block) pairs; over it the largest replica's oldest are forgotten."""
        self._index = PrefixIndex(max_blocks)

    def num_blocks(self, replica_id: str) -> int:
        """Distinct blocks that were routed to the replica."""
        return self._index.num_blocks(replica_id)

    def hit_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of a prompt were routed to each replica; those that lack the first are left out."""
        return self._index.hit_blocks(hashes)

    def seen(self, views: Sequence[ReplicaView], hashes: Sequence[bytes], block_size_tokens: int) -> list[ReplicaView]:
        """The views, each with what its replica was routed of the prompt before, its history and its order."""
        routed = self.hit_blocks(hashes)
        longest = max((routed.get(view.replica_id, 0) for view in views), default=0)
        prefix = hashes[longest - 1] if longest else b""
        return [
            replace(
                view,
                routed_tokens=routed.get(view.replica_id, 0) * block_size_tokens,
                history_blocks=self.num_blocks(view.replica_id),
                home_order=_home_order(prefix, view.replica_id),
            )
            for view in views
        ]

    def record(self, replica_id: str, hashes: Sequence[bytes]) -> None:
        """The prompt of these blocks was routed to the replica."""
        known = self.hit_blocks(hashes).get(replica_id, 0)
        self._index.stored(replica_id, hashes[known:])

    def drop(self, replica_id: str) -> None:
        """The replica is gone, and its history with it."""
        self._index.drop(replica_id)

    def forget_all(self) -> None:
        """Start with an empty history."""
        self._index = PrefixIndex(self._index.max_entries)

    def check_integrity(self, replica_ids: Set[str]) -> None:
        """Raise AssertionError unless the index is sound and only these replicas have a history."""
        self._index.check_integrity()
        held = sum(self.num_blocks(replica_id) for replica_id in replica_ids)
        assert held == self._index.num_entries, (held, self._index.num_entries)


def _home_order(prefix: bytes, replica_id: str) -> int:
    return int.from_bytes(blake2b(prefix + replica_id.encode(), digest_size=8).digest(), "big")
