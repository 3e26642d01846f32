"""Which replica holds which KV block, kept from the engines' KV events.

One dictionary maps a block's key to a bit mask of its holders, so that one walk over a prompt's blocks answers for all
replicas: O(blocks) however many replicas there are. A second dictionary for each replica counts copies: vLLM does not
merge two blocks of one content that were computed at the same time, and reports each of them stored and removed on its
own (vllm/v1/core/block_pool.py, `BlockHashToBlockMap`, note 1), so a block is gone only when its last copy is.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

FORGOTTEN_SHARE = 16
"""Over the cap, 1/16 of the largest replica's entries go at once, so that finding the oldest costs O(1) an entry."""


class PrefixIndex:
    """Holders of KV blocks; unknown replicas hold nothing and come into being with their first stored block."""

    def __init__(self, max_entries: int) -> None:
        """Args: max_entries: cap on (replica, block) pairs. Raises: ValueError: not at least 1."""
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries}")
        self.max_entries = max_entries
        self.num_entries = 0
        """(replica, block) pairs held now, copies of one block on one replica counted once."""
        self.num_forgotten = 0
        """Pairs given up because of the cap, ever; their blocks are still in the engine but get no credit."""
        self._holders: dict[bytes, int] = {}
        self._copies: dict[str, dict[bytes, int]] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def stored(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        """The replica stored one more copy of each block."""
        bit, copies = self._bit_of(replica_id), self._copies[replica_id]
        for key in hashes:
            known = copies.get(key, 0)
            copies[key] = known + 1
            if not known:
                self._holders[key] = self._holders.get(key, 0) | bit
                self.num_entries += 1
        while self.num_entries > self.max_entries:
            self._forget_oldest()

    def removed(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        """The replica lost one copy of each block; blocks that it was not known to hold are ignored."""
        copies = self._copies.get(replica_id, {})
        for key in hashes:
            left = copies.get(key, 0) - 1
            if left > 0:
                copies[key] = left
            elif left == 0:
                self._forget(replica_id, (key,))

    def clear(self, replica_id: str) -> None:
        """The replica lost every block, or nobody knows any more what it holds. O(its blocks)."""
        self._forget(replica_id, tuple(self._copies.get(replica_id, ())))

    def drop(self, replica_id: str) -> None:
        """The replica is gone: forget its blocks and itself."""
        self.clear(replica_id)
        self._copies.pop(replica_id, None)
        self._names.pop(self._bits.pop(replica_id, 0), None)

    def hit_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of a prompt each replica holds; replicas that lack the first are left out."""
        holders = self._holders
        alive = holders.get(hashes[0], 0) if hashes else 0
        hits: dict[str, int] = {}
        for num_blocks, key in enumerate(hashes):
            still = holders.get(key, 0) & alive
            if still != alive:
                hits |= dict.fromkeys(self._replicas_of(alive ^ still), num_blocks)
                alive = still
                if not alive:
                    break
        return hits | dict.fromkeys(self._replicas_of(alive), len(hashes))

    def num_blocks(self, replica_id: str) -> int:
        """Distinct blocks that the replica is known to hold."""
        return len(self._copies.get(replica_id, ()))

    def check_integrity(self) -> None:
        """Raise AssertionError unless both dictionaries tell the same pairs, each with a copy, within the cap."""
        pairs = {(replica_id, key) for replica_id, copies in self._copies.items() for key in copies}
        assert pairs == {
            (replica_id, key)
            for key, mask in self._holders.items()
            for replica_id, bit in self._bits.items()
            if mask & bit
        }, "holders and copies disagree"
        assert len(pairs) == self.num_entries <= self.max_entries, (len(pairs), self.num_entries, self.max_entries)
        assert all(n > 0 for copies in self._copies.values() for n in copies.values()), "an entry without a copy"
        bits = sum(self._bits.values())
        assert all(mask and not mask & ~bits for mask in self._holders.values()), "a block without a known holder"
        assert self._bits.keys() == self._copies.keys(), "a replica without its bit"
        assert self._names == {bit: name for name, bit in self._bits.items()}, "bits and names disagree"

    def _bit_of(self, replica_id: str) -> int:
        bit = self._bits.get(replica_id)
        if bit is None:
            bit = next(1 << i for i in range(len(self._names) + 1) if 1 << i not in self._names)
            self._bits[replica_id] = bit
            self._names[bit] = replica_id
            self._copies[replica_id] = {}
        return bit

    def _replicas_of(self, mask: int) -> Iterator[str]:
        while mask:
            lowest = mask & -mask
            yield self._names[lowest]
            mask ^= lowest

    def _forget_oldest(self) -> None:
        largest = max(self._copies, key=lambda replica_id: len(self._copies[replica_id]))
        copies = self._copies[largest]
        over = self.num_entries - self.max_entries
        oldest = tuple(islice(copies, max(over, len(copies) // FORGOTTEN_SHARE)))
        self.num_forgotten += len(oldest)
        self._forget(largest, oldest)

    def _forget(self, replica_id: str, keys: Iterable[bytes]) -> None:
        if not (copies := self._copies.get(replica_id)):
            return
        others = ~self._bits[replica_id]
        for key in keys:
            del copies[key]
            self.num_entries -= 1
            left = self._holders[key] & others
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
