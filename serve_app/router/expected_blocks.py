"""Blocks that open requests are about to store on their replicas: credit in advance, until a KV event or the end.

A request expects, on the replica that it was routed to, those of its blocks that the replica isn't known to hold. A
block's stored event confirms it for all requests; otherwise it stays expected as long as one of them is open. Every
expectation has a serial number and every expected block that of the expectation which brought it, so that an older
request never takes credit that younger ones brought anew: it counts for a block only where the block is not younger.
O(1) for each block of a request, whatever the number of requests that share it.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import getsizeof

BYTES_PER_REQUEST = 320
"""Of an open request's record, id and place in the queue, without its blocks."""


@dataclass(frozen=True, slots=True)
class _Open:
    replica_id: str
    keys: tuple[bytes, ...]
    """The blocks that the request counts for, unless they were confirmed or lost since."""
    serial: int
    since_s: float


@dataclass(slots=True)
class _Blocks:
    """Of one replica."""

    serials: dict[bytes, int] = field(default_factory=dict)
    """By block: the expectation that brought it."""
    others: dict[bytes, int] = field(default_factory=dict)
    """By block that more than one request counts for: how many beside the first."""


class ExpectedBlocks:
    """Unconfirmed blocks by replica, and the open requests that count for them, oldest first."""

    def __init__(self) -> None:
        self.num_references = 0
        """Blocks that open requests were given to count for, each as often as there are such requests."""
        self._requests: OrderedDict[str, _Open] = OrderedDict()
        self._blocks: dict[str, _Blocks] = {}
        self._last_serial = 0

    @property
    def num_blocks(self) -> int:
        """(replica, block) pairs that are expected, each once."""
        return sum(len(blocks.serials) for blocks in self._blocks.values())

    @property
    def num_requests(self) -> int:
        """Open requests."""
        return len(self._requests)

    def on_replica(self, replica_id: str) -> Mapping[bytes, int]:
        """The replica's expected blocks, as they are until its next expectation."""
        blocks = self._blocks.get(replica_id)
        return blocks.serials if blocks else {}

    def add(self, replica_id: str, request_id: str, keys: Sequence[bytes], now_s: float) -> list[bytes]:
        """The request, which is not open, expects these blocks, each named once; returns those that nobody expected."""
        self._last_serial += 1
        blocks = self._blocks.setdefault(replica_id, _Blocks())
        serials, others = blocks.serials, blocks.others
        new = [key for key in keys if key not in serials]
        if len(new) < len(keys):
            for key in keys:
                if key in serials:
                    others[key] = others.get(key, 0) + 1
        serials.update(dict.fromkeys(new, self._last_serial))
        self._requests[request_id] = _Open(replica_id, tuple(keys), self._last_serial, now_s)
        self.num_references += len(keys)
        return new

    def settle(self, replica_id: str, key: bytes) -> bool:
        """The block is there, or gone, so nobody counts for it any more; False when nobody did."""
        blocks = self._blocks.get(replica_id)
        if blocks is None or blocks.serials.pop(key, None) is None:
            return False
        blocks.others.pop(key, None)
        return True

    def withdraw(self, request_id: str) -> tuple[str, list[bytes]]:
        """The request counts no more; returns its replica and the blocks that nobody expects now.

        Raises KeyError when the request is not open.
        """
        request = self._requests.pop(request_id)
        self.num_references -= len(request.keys)
        blocks, lost = self._blocks.get(request.replica_id, _Blocks()), list[bytes]()
        for key in request.keys:
            if blocks.serials.get(key, request.serial + 1) > request.serial:
                continue
            left = blocks.others.pop(key, 0)
            if not left:
                del blocks.serials[key]
                lost.append(key)
            elif left > 1:
                blocks.others[key] = left - 1
        return request.replica_id, lost

    def is_open(self, request_id: str) -> bool:
        """Whether the request was added and not withdrawn."""
        return request_id in self._requests

    def oldest(self) -> tuple[str, float] | None:
        """Id of the request that has been open longest, and since when; None when there is none."""
        request_id = next(iter(self._requests), None)
        return None if request_id is None else (request_id, self._requests[request_id].since_s)

    def forget_replica(self, replica_id: str) -> list[bytes]:
        """Nothing is expected there any more; returns what was. Its requests stay open, and count for nothing."""
        blocks = self._blocks.pop(replica_id, None)
        return list(blocks.serials) if blocks else []

    def pairs(self) -> set[tuple[str, bytes]]:
        """Every (replica, block) that is expected."""
        return {(replica_id, key) for replica_id, blocks in self._blocks.items() for key in blocks.serials}

    def bytes_estimated(self) -> int:
        """Memory of everything here without the keys, which belong to the requests' prompts."""
        tables = sum(getsizeof(blocks.serials) + getsizeof(blocks.others) for blocks in self._blocks.values())
        return tables + getsizeof(self._requests) + BYTES_PER_REQUEST * self.num_requests + 8 * self.num_references

    def check_integrity(self) -> None:
        """Raise AssertionError unless every expected block is counted for by exactly the open requests that may."""
        counts = Counter(
            (request.replica_id, key)
            for request in self._requests.values()
            if (blocks := self._blocks.get(request.replica_id))
            for key in request.keys
            if blocks.serials.get(key, request.serial + 1) <= request.serial
        )
        told = {pair: 1 + self._blocks[pair[0]].others.get(pair[1], 0) for pair in self.pairs()}
        assert counts == told, "expected blocks and open requests disagree"
        assert all(blocks.others.keys() <= blocks.serials.keys() for blocks in self._blocks.values()), "a stray count"
        references = sum(len(request.keys) for request in self._requests.values())
        assert references == self.num_references, (references, self.num_references)
