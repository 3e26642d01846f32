"""Which replica holds which KV block, kept from the engines' KV events.

A dictionary maps a block's key to a bit mask of its holders, so that one walk over a prompt's blocks answers for all
replicas: O(blocks) however many replicas there are. It is split in 256 by the key's last byte: a dictionary copies
itself now and then as blocks come and go, and all entries at once would hold up the event loop for tens of ms. Another
dictionary for each replica counts copies: vLLM does not merge two blocks of one content that were computed at the same
time, and reports each of them stored and removed on its own (vllm/v1/core/block_pool.py, `BlockHashToBlockMap`, note
1), so a block is gone only when its last copy is.

A request that was just routed will have its blocks on its replica soon: `expect` credits them at once, so that the next
request of the same prefix goes to the same place although no KV event has come (`expected_blocks`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from sys import getsizeof

from serve_app.router.expected_blocks import ExpectedBlocks

FORGOTTEN_SHARE = 16
"""Over the cap, 1/16 of the largest replica's entries go at once, so that finding the oldest costs O(1) an entry."""

EXPECTED_SHARE = 4
"""Blocks that open requests expect take at most a quarter of the cap, counted for each request: they may never come."""
KEY_OBJECT_BYTES = getsizeof(bytes(8))
SHARED_INTEGER_BITS = 8
"""The interpreter keeps one object for each integer under 2**8; wider masks of holders cost memory."""

_MaskOf = Callable[[bytes, int], int]


class PrefixIndex:
    """Holders of KV blocks; unknown replicas hold nothing and come into being with their first stored block."""

    def __init__(self, max_entries: int) -> None:
        """Args: max_entries: cap on (replica, block) pairs. Raises: ValueError: not at least 1."""
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries}")
        self.max_entries = max_entries
        self.num_entries = 0
        """(replica, block) pairs held or expected now, copies of one block on one replica counted once."""
        self.num_forgotten = 0
        """Pairs given up because of the cap, ever; their blocks are still in the engine but get no credit."""
        self._holders: tuple[dict[bytes, int], ...] = tuple({} for _ in range(256))
        self._masks: tuple[_MaskOf, ...] = tuple(shard.get for shard in self._holders)
        self._copies: dict[str, dict[bytes, int]] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._expected = ExpectedBlocks()

    def stored(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        """The replica stored one more copy of each block."""
        bit, copies = self._bit_of(replica_id), self._copies[replica_id]
        expected = self._expected.on_replica(replica_id)
        new = []
        for key in hashes:
            known = copies.get(key, 0)
            copies[key] = known + 1
            if not known and not (key in expected and self._expected.settle(replica_id, key)):
                new.append(key)
        self._credit(bit, new)

    def removed(self, replica_id: str, hashes: Iterable[bytes]) -> None:
        """The replica lost one copy of each block; of blocks that it was only expected to store, nothing is left."""
        copies, expected = self._copies.get(replica_id, {}), self._expected.on_replica(replica_id)
        for key in hashes:
            left = copies.get(key, 0) - 1
            if left > 0:
                copies[key] = left
            elif left == 0:
                del copies[key]
                self._discredit(replica_id, (key,))
            elif key in expected and self._expected.settle(replica_id, key):
                self._discredit(replica_id, (key,))

    def clear(self, replica_id: str) -> None:
        """The replica lost every block, or nobody knows any more what it holds. O(its blocks)."""
        held = self._copies.get(replica_id, {})
        self._discredit(replica_id, held)
        held.clear()
        self._discredit(replica_id, self._expected.forget_replica(replica_id))

    def drop(self, replica_id: str) -> None:
        """The replica is gone: forget its blocks and itself."""
        self.clear(replica_id)
        self._copies.pop(replica_id, None)
        self._names.pop(self._bits.pop(replica_id, 0), None)

    def expect(self, replica_id: str, request_id: str, hashes: Iterable[bytes], now_s: float) -> None:
        """The request was routed to the replica, which will soon hold its blocks: they count as held from now on.

        Each expected block becomes an ordinary one with its stored event. What was expected of the request before is
        withdrawn. Of a prompt longer than a quarter of the cap only the leading blocks count.

        Args: now_s: not less than at the call before, in seconds of the caller's clock. O(blocks)
        """
        self.unexpect(request_id)
        bit, copies = self._bit_of(replica_id), self._copies[replica_id]
        most = max(1, self.max_entries // EXPECTED_SHARE)
        keys = [key for key in dict.fromkeys(hashes) if key not in copies][:most]
        while self._expected.num_references + len(keys) > most and (oldest := self._expected.oldest()):
            self.num_forgotten += self.unexpect(oldest[0])
        if keys:
            self._credit(bit, self._expected.add(replica_id, request_id, keys, now_s))

    def unexpect(self, request_id: str) -> int:
        """The request has ended: what it alone expected, and no event has confirmed, loses its credit.

        Returns: (replica, block) pairs that lost it; 0 for an unknown request. O(blocks of the request)
        """
        if not self._expected.is_open(request_id):
            return 0
        replica_id, lost = self._expected.withdraw(request_id)
        self._discredit(replica_id, lost)
        return len(lost)

    def expire_expected(self, now_s: float, older_than_s: float) -> int:
        """`unexpect` each request that has been expected for longer; returns the sum. O(blocks of what expires)"""
        num_lost = 0
        while (oldest := self._expected.oldest()) and now_s - oldest[1] > older_than_s:
            num_lost += self.unexpect(oldest[0])
        return num_lost

    def hit_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of a prompt each replica holds; replicas that lack the first are left out."""
        masks, hits = self._masks, dict[str, int]()
        alive = masks[hashes[0][-1]](hashes[0], 0) if hashes else 0
        if not alive:
            return hits
        for num_blocks, key in enumerate(hashes):
            mask = masks[key[-1]](key, 0)
            if mask is alive or mask & alive == alive:
                continue
            hits.update(dict.fromkeys(self._replicas_of(alive & ~mask), num_blocks))
            alive &= mask
            if not alive:
                return hits
        hits.update(dict.fromkeys(self._replicas_of(alive), len(hashes)))
        return hits

    def num_blocks(self, replica_id: str) -> int:
        """Distinct blocks that the replica is known to hold."""
        return len(self._copies.get(replica_id, ()))

    @property
    def num_expected(self) -> int:
        """(replica, block) pairs that have credit but no stored event yet."""
        return self._expected.num_blocks

    def bytes_estimated(self) -> int:
        """Memory of the index, right within a quarter; a block's key counts for each replica that stored it."""
        tables = sum(map(getsizeof, (*self._holders, *self._copies.values())))
        widest = max(self._bits.values(), default=0)
        # Blocks that came in one event share their mask, others have one each: half of them is taken for the mean.
        masks = getsizeof(widest) * sum(map(len, self._holders)) // 2 if widest >> SHARED_INTEGER_BITS else 0
        return tables + KEY_OBJECT_BYTES * self.num_entries + masks + self._expected.bytes_estimated()

    def check_integrity(self) -> None:
        """Raise AssertionError unless holders are exactly those with a copy or an expectation, within the cap."""
        held = {(replica_id, key) for replica_id, copies in self._copies.items() for key in copies}
        holders = {key: mask for shard in self._holders for key, mask in shard.items()}
        pairs, expected = _pairs(holders, self._bits), self._expected.pairs()
        assert not held & expected, "a block both held and expected"
        assert pairs == held | expected, "holders and copies disagree"
        assert len(pairs) == self.num_entries <= self.max_entries, (len(pairs), self.num_entries, self.max_entries)
        assert len(expected) == self.num_expected, (len(expected), self.num_expected)
        assert self._expected.num_references <= max(1, self.max_entries // EXPECTED_SHARE), "too much expected"
        self._expected.check_integrity()
        assert all(n > 0 for copies in self._copies.values() for n in copies.values()), "an entry without a copy"
        bits = sum(self._bits.values())
        assert all(mask and not mask & ~bits for mask in holders.values()), "a block without a known holder"
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

    def _credit(self, bit: int, keys: Iterable[bytes]) -> None:
        """The replica of this bit holds these blocks, of which it held none. Blocks of one run share a mask object."""
        holders, before, after, num_entries = self._holders, 0, bit, self.num_entries
        for key in keys:
            shard = holders[key[-1]]
            mask = shard.get(key, 0)
            if mask != before:
                before, after = mask, mask | bit
            shard[key] = after
            num_entries += 1
        self.num_entries = num_entries
        while self.num_entries > self.max_entries:
            self._forget_oldest()

    def _discredit(self, replica_id: str, keys: Iterable[bytes]) -> None:
        """The replica holds these blocks no more, of which it held every one."""
        others, holders, before, after = ~self._bits.get(replica_id, 0), self._holders, 0, 0
        for key in keys:
            self.num_entries -= 1
            shard = holders[key[-1]]
            mask = shard[key]
            if mask != before:
                before, after = mask, mask & others
            if after:
                shard[key] = after
            else:
                del shard[key]

    def _forget_oldest(self) -> None:
        """Of the replica with the most blocks, the oldest; expected ones are too few to be over the cap alone."""
        largest = max(self._copies, key=lambda replica_id: len(self._copies[replica_id]))
        copies = self._copies[largest]
        over = self.num_entries - self.max_entries
        oldest = tuple(islice(copies, max(over, len(copies) // FORGOTTEN_SHARE)))
        for key in oldest:
            del copies[key]
        self.num_forgotten += len(oldest)
        self._discredit(largest, oldest)


def _pairs(holders: Mapping[bytes, int], bits: Mapping[str, int]) -> set[tuple[str, bytes]]:
    return {(replica_id, key) for key, mask in holders.items() for replica_id, bit in bits.items() if mask & bit}
