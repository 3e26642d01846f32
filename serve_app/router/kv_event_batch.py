"""One batch of an engine's KV events, from bytes to values.

vLLM sends MessagePack: [time stamp, [event, ...], data-parallel rank], an event being a map whose "type" is its class
name (vllm/distributed/kv_events.py). Fields that are not needed here are skipped unread.
"""

from dataclasses import dataclass

import msgspec

from serve_app.router.block_hashes import block_key

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


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_DECODER = msgspec.msgpack.Decoder(_Batch)


def decode_batch(payload: bytes) -> list[KvEvent]:
    """The events of one batch that concern blocks in the engine's own GPU memory, in order.

    Blocks of an offloading tier are no prefix hits. Of a hybrid model's KV cache groups the first one speaks for all.

    Raises:
        ValueError: not a batch of KV events.
    """
    return decode_stamped(payload)[1]


def decode_stamped(payload: bytes) -> tuple[float, list[KvEvent]]:
    """The batch's time stamp, seconds since the epoch on the engine's clock, and what `decode_batch` returns."""
    try:
        batch = _DECODER.decode(payload)
        return batch.ts, [_event(wire) for wire in batch.events if isinstance(wire, _Cleared) or _is_local(wire)]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def _is_local(wire: _Stored | _Removed) -> bool:
    return wire.medium in GPU_MEDIA and wire.group_idx in (None, 0) and wire.locality in (None, "LOCAL")


def _event(wire: _Stored | _Removed | _Cleared) -> KvEvent:
    if isinstance(wire, _Cleared):
        return ClearedEvent()
    keys = tuple(map(block_key, wire.block_hashes))
    return StoredEvent(keys) if isinstance(wire, _Stored) else RemovedEvent(keys)
