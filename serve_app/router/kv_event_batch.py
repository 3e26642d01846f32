"""One batch of an engine's KV events, from bytes to values.

vLLM sends MessagePack: [time stamp, [event, ...], data-parallel rank], an event being a map whose "type" is its class
name (vllm/distributed/kv_events.py). Fields that are not needed here are skipped unread.

A batch is opened at once (0.1 us a block) and read in slices, so that a large one need not hold up the event loop. Of
events only those count that concern blocks in the engine's own GPU memory: blocks of an offloading tier are no prefix
hits, and of a hybrid model's KV cache groups the first one speaks for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from serve_app.router.block_hashes import KEY_BYTES, block_key

GPU_MEDIA = (None, "GPU")


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """The engine cached one more copy of each block; `hashes` are block keys."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """The engine lost one copy of each block; `hashes` are block keys."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ClearedEvent:
    """The engine lost every block."""


KvEvent = StoredEvent | RemovedEvent | ClearedEvent


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class KvBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch whose events are still unread."""

    ts: float
    """Seconds since the epoch on the engine's clock."""
    events: list[msgspec.Raw]


_BATCHES = msgspec.msgpack.Decoder(KvBatch)
_EVENTS = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)


def open_batch(payload: bytes) -> KvBatch:
    """The batch, its events unread.

    Raises:
        ValueError: not a batch of KV events.
    """
    try:
        return _BATCHES.decode(payload)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def slices(batch: KvBatch, max_blocks: int) -> Iterator[list[KvEvent]]:
    """What the batch says, in order, in lists that name at most `max_blocks` blocks and come from as many events.

    Events of one kind in a row are one: an engine whose cache is full tells each removed block in an event of its own.

    Raises:
        ValueError: an event can't be read, when it is reached; those before it are right.
    """
    part, room = _Part(), max_blocks
    for raw in batch.events:
        wire = _read(raw)
        hashes = [] if isinstance(wire, _Cleared) or not _is_local(wire) else wire.block_hashes
        while len(hashes) > room:
            part.add(wire, hashes[:room])
            yield part.taken()
            hashes, room = hashes[room:], max_blocks
        if hashes or isinstance(wire, _Cleared):
            part.add(wire, hashes)
        room -= max(1, len(hashes))
        if room <= 0:
            yield part.taken()
            room = max_blocks
    yield part.taken()


class _Part:
    """A list of events in the making; those of one kind in a row become one."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._kind: type[_Stored | _Removed | _Cleared] = _Cleared
        self._keys: list[bytes] = []

    def add(self, wire: _Stored | _Removed | _Cleared, hashes: list[bytes | int]) -> None:
        """Raises ValueError when a hash is none."""
        if type(wire) is not self._kind:
            self._end_run()
            self._kind = type(wire)
        if isinstance(wire, _Cleared):
            self._events.append(ClearedEvent())
        self._keys += _keys(hashes)

    def taken(self) -> list[KvEvent]:
        """The events so far; the next list begins empty."""
        self._end_run()
        events, self._events = self._events, []
        return events

    def _end_run(self) -> None:
        if self._keys:
            keys, self._keys = tuple(self._keys), []
            self._events.append(StoredEvent(keys) if self._kind is _Stored else RemovedEvent(keys))


def decode_batch(payload: bytes) -> list[KvEvent]:
    """All events of one batch, in order.

    Raises:
        ValueError: not a batch of KV events.
    """
    batch = open_batch(payload)
    return [event for part in slices(batch, 1 + len(payload)) for event in part]


def _read(raw: msgspec.Raw) -> _Stored | _Removed | _Cleared:
    try:
        event: _Stored | _Removed | _Cleared = _EVENTS.decode(raw)
        return event
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def _is_local(wire: _Stored | _Removed) -> bool:
    return wire.medium in GPU_MEDIA and wire.group_idx in (None, 0) and wire.locality in (None, "LOCAL")


def _keys(hashes: list[bytes | int]) -> list[bytes]:
    try:
        return [one.to_bytes(KEY_BYTES, "big") if type(one) is int else block_key(one) for one in hashes]
    except (ValueError, OverflowError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error
