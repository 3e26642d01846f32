"""The chained block hashes of vLLM's "sha256", without a call of pickle for each block.

vLLM hashes pickle((parent hash, token ids, extra keys)) of every block. An integer pickles alike wherever it stands, so
one pickle of a longer run of token ids holds the inner bytes of all its blocks, one after the other:

    pickle(run)   = PROTO FRAME MARK ids...                                            TUPLE MEMOIZE STOP
    pickle(block) = PROTO FRAME SHORT_BINBYTES 32 parent MEMOIZE MARK ids of the block TUPLE MEMOIZE extra TUPLE3 ...

What stands around the ids is cut out of a real pickle, not written from memory. Wherever that doesn't hold (integers of
more than 32 bits, NumPy integers, blocks of under 4 tokens), each block is pickled as vLLM does it.
"""

import pickle
import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate

import numpy as np

PROTOCOL = pickle.HIGHEST_PROTOCOL
FRAME_BYTES = 9
RUN_HEAD = 2 + FRAME_BYTES + 1
"""Bytes before the first id of a pickled run: PROTO and its version, FRAME and its length, MARK."""
RUN_TAIL = 3
"""Bytes after the last id of a pickled run: TUPLE, MEMOIZE, STOP."""
FEWEST_TOKENS = 4
"""Shorter tuples are pickled without a MARK."""
NARROWEST, WIDEST = 2, 5
"""Bytes that pickle writes for a token id: 2 under 2**8, 3 under 2**16, else 5 (a signed 32-bit integer)."""
ID_BYTES = 4
"""Bytes of a token id in `pack_ids`."""
MAX_RUN_TOKENS = 8_192
"""Longest run in one pickle: 40 KB, under the 64 KB at which pickle begins another frame."""

Extra = tuple[str, ...] | None


def extra_keys(cache_salt: str | None, lora_name: str | None) -> Extra:
    """What vLLM hashes beside a block's tokens: the adapter's name in every block, the salt in a prompt's first."""
    return (((lora_name,) if lora_name else ()) + ((cache_salt,) if cache_salt else ())) or None


def hashes_one_by_one(
    parent: bytes, ids: tuple[int, ...], block_size_tokens: int, first_extra: Extra, extra: Extra
) -> list[bytes]:
    """The chained hashes of whole blocks, each pickled as vLLM does it; any integers, any block size.

    Args:
        parent: hash before the first block, 32 bytes.
        ids: (n * block_size_tokens,)
        first_extra: extra keys of the first block.
        extra: extra keys of the others.

    Returns: (n,), 32 bytes each.
    """
    hashes = []
    for at in range(0, len(ids), block_size_tokens):
        block = (parent, ids[at : at + block_size_tokens], extra if at else first_extra)
        parent = sha256(pickle.dumps(block, protocol=PROTOCOL)).digest()
        hashes.append(parent)
    return hashes


def run_hashes(
    parent: bytes, ids: tuple[int, ...], widths: Sequence[int], first_extra: Extra, extra: Extra
) -> list[bytes]:
    """As `hashes_one_by_one`, with one pickle for all blocks; at most `MAX_RUN_TOKENS` ids.

    Args: widths: (n,), at least 1 block, `block_widths` of the ids.

    Returns: (n,), 32 bytes each; empty when the ids pickle to other lengths (they are not all of type `int`).
    """
    pickled = pickle.dumps(ids, protocol=PROTOCOL)
    ends = list(accumulate(widths, initial=RUN_HEAD))
    if ends[-1] + RUN_TAIL != len(pickled):
        return []
    size, begin, join, hashes = len(ids) // len(widths), RUN_HEAD, b"".join, list[bytes]()
    if first_extra != extra:
        hashes = hashes_one_by_one(parent, ids[:size], size, first_extra, extra)
        parent, begin, ends = hashes[-1], ends[1], ends[1:]
    heads, middle, tail = _around(size, extra)
    for end in ends[1:]:
        parent = sha256(join((heads[end - begin], parent, middle, pickled[begin:end], tail))).digest()
        hashes.append(parent)
        begin = end
    return hashes


def pack_ids(ids: tuple[int, ...]) -> bytes:
    """The ids as 32-bit integers, 4 bytes each; empty when some don't fit."""
    try:
        return struct.pack(f"{len(ids)}i", *ids)
    except struct.error:
        return b""


def block_widths(packed: bytes, block_size_tokens: int) -> list[int]:
    """Bytes that pickle writes for the ids of each block.

    Args: packed: `pack_ids` of whole blocks, (4 * block_size_tokens * n,). Returns: (n,)
    """
    ids = np.frombuffer(packed, dtype=np.uint32).reshape(-1, block_size_tokens)
    two_bytes, four_bytes = np.count_nonzero(ids > 0xFF, axis=1), np.count_nonzero(ids > 0xFFFF, axis=1)
    widths: list[int] = (NARROWEST * block_size_tokens + two_bytes + 2 * four_bytes).tolist()
    return widths


@lru_cache(maxsize=256)
def _around(block_size_tokens: int, extra: Extra) -> tuple[dict[int, bytes], bytes, bytes]:
    """What stands in a block's pickle before the parent (by the width of the ids), up to the ids, and after them."""
    parent, ids = b"\xa5" * 32, (1,) * block_size_tokens
    inner = pickle.dumps(ids, protocol=PROTOCOL)[RUN_HEAD:-RUN_TAIL]
    before, after = pickle.dumps((parent, ids, extra), protocol=PROTOCOL).split(parent)
    middle, tail = after[: after.index(inner)], after[after.index(inner) + len(inner) :]
    others = int.from_bytes(before[3:11], "little") - len(inner)
    widths = range(NARROWEST * block_size_tokens, WIDEST * block_size_tokens + 1)
    return {n: before[:3] + (others + n).to_bytes(8, "little") + before[11:] for n in widths}, middle, tail
