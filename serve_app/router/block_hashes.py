"""KV-block keys of a prompt, the same that an engine's KV events carry.

vLLM names a full KV block by a chained hash of its prefix: hash(parent, token ids, extra keys). The engines' default
algorithm, "sha256", hashes Python's pickle of that triple; `block_pickles` writes the same bytes for less, and tests
compare with vLLM's own hasher. The engine publishes a hash either whole (32 bytes) or, by default in 0.29
(`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1`), as the integer of its last 8 bytes; the key of a block is those 8 bytes, so
both kinds of engine match without a setting. Among 4 million blocks two distinct ones share a key with probability
4e-7, and the harm is one wrong routing hint.

The chain's root depends on `PYTHONHASHSEED` of each process: `seed_fingerprint` tells whether two processes agree. vLLM
is imported on first use, so that processes which only load the router's classes don't pay for it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from serve_app.router.block_pickles import (
    FEWEST_TOKENS,
    ID_BYTES,
    MAX_RUN_TOKENS,
    block_widths,
    extra_keys,
    hashes_one_by_one,
    pack_ids,
    run_hashes,
)

KEY_BYTES = 8
"""Length of a block's key: what is left of a hash that vLLM publishes as an integer."""
RUN_BLOCKS = 32
"""Blocks of one run: shorter ones find more of a shared prefix in the memo, longer ones cost less."""
MEMO_RUNS = 8_192
"""Runs remembered, about 4 KB each at 16 tokens a block: 4 million tokens of prefixes in 32 MB."""


def block_key(published: bytes | int) -> bytes:
    """The key of a block whose hash vLLM published whole (bytes) or as an unsigned 64-bit integer.

    Raises:
        ValueError: fewer than 8 bytes, or an integer outside 0..2**64-1.
    """
    if isinstance(published, int):
        if not 0 <= published < 1 << (8 * KEY_BYTES):
            raise ValueError(f"block hash must be an unsigned 64-bit integer, got {published}")
        return published.to_bytes(KEY_BYTES, "big")
    if len(published) < KEY_BYTES:
        raise ValueError(f"block hash must have at least {KEY_BYTES} bytes, got {published!r}")
    return published[-KEY_BYTES:]


def seed_fingerprint() -> str:
    """16 hex digits of the root of this process' hash chains; equal in two processes when their block keys can match.

    Reads `PYTHONHASHSEED` as vLLM does and leaves vLLM's global root alone, so an engine process may call it too.
    """
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    root: bytes = sha256(resolve_none_hash_seed(sha256))
    return root.hex()[:16]


class BlockHasher:
    """Hashes prompts at one block size, and remembers prefixes. Not safe for several threads at once.

    Cost: O(tokens); two thirds of what vLLM's hasher takes, a seventh where the memo knows the prefix.
    """

    def __init__(self, block_size_tokens: int, memo_runs: int = MEMO_RUNS) -> None:
        """Make a hasher, and set vLLM's global root of hash chains as an engine does.

        Args:
            block_size_tokens: as the engines resolved it.
            memo_runs: most runs of blocks to remember, the least recently used leave; 0 remembers none.

        Raises:
            ValueError: block_size_tokens is not at least 1 or memo_runs not at least 0.
        """
        if block_size_tokens < 1:
            raise ValueError(f"block_size_tokens must be at least 1, got {block_size_tokens}")
        if memo_runs < 0:
            raise ValueError(f"memo_runs must be at least 0, got {memo_runs}")
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils

        kv_cache_utils.init_none_hash(sha256)
        self.block_size_tokens = block_size_tokens
        self.memo_runs = memo_runs
        self._root: bytes = kv_cache_utils.NONE_HASH
        self._run_blocks = max(1, min(RUN_BLOCKS, MAX_RUN_TOKENS // block_size_tokens))
        self._memo: OrderedDict[_Run, _Known] = OrderedDict()

    @property
    def num_remembered(self) -> int:
        """Runs of blocks in the memo."""
        return len(self._memo)

    def hashes(
        self, token_ids: Sequence[int], cache_salt: str | None = None, lora_name: str | None = None
    ) -> tuple[bytes, ...]:
        """Keys of the full blocks, in order; the last, partial block has none.

        Args:
            token_ids: (n,), Python integers (a NumPy integer pickles, and so hashes, differently).
            cache_salt: the request's `cache_salt`, which separates its blocks from everybody else's.
            lora_name: name of the LoRA adapter that the request uses.

        Returns: (n // block_size_tokens,), 8 bytes each.
        """
        prompt = self._prompt(token_ids, cache_salt, lora_name)
        keys, parent = self._recall(prompt)
        for run, hashes in self._chain(prompt, len(keys), parent):
            known = _Known(tuple([one[-KEY_BYTES:] for one in hashes]), hashes[-1])
            keys += known.keys
            if run is not None and len(hashes) == self._run_blocks:
                self._memo[run] = known
        while len(self._memo) > self.memo_runs:
            self._memo.popitem(last=False)
        return tuple(keys)

    def whole_hashes(
        self, token_ids: Sequence[int], cache_salt: str | None = None, lora_name: str | None = None
    ) -> list[bytes]:
        """As `hashes`, but what vLLM itself keeps with a request: 32 bytes each. Leaves the memo alone."""
        prompt = self._prompt(token_ids, cache_salt, lora_name)
        return [one for _, hashes in self._chain(prompt, 0, self._root) for one in hashes]

    def _prompt(self, token_ids: Sequence[int], cache_salt: str | None, lora_name: str | None) -> "_Prompt":
        ids = tuple(token_ids[: len(token_ids) - len(token_ids) % self.block_size_tokens])
        packed = pack_ids(ids) if self.block_size_tokens >= FEWEST_TOKENS else b""
        return _Prompt(ids, packed, cache_salt or None, lora_name or None)

    def _recall(self, prompt: "_Prompt") -> tuple[list[bytes], bytes]:
        """Keys of the leading runs that the memo knows, and the hash that the next block has for its parent."""
        keys, parent, step = list[bytes](), self._root, self._run_blocks * self.block_size_tokens
        for at in range(0, len(prompt.packed) // ID_BYTES - step + 1, step):
            run = prompt.run(parent, at, at + step)
            known = self._memo.get(run)
            if known is None:
                break
            self._memo.move_to_end(run)
            keys += known.keys
            parent = known.last_hash
        return keys, parent

    def _chain(self, prompt: "_Prompt", done_blocks: int, parent: bytes) -> Iterator[tuple["_Run | None", list[bytes]]]:
        """Hashes of each run after `done_blocks`, the last maybe shorter; a run without a name is not for the memo."""
        size, step = self.block_size_tokens, self._run_blocks
        salted, extra = extra_keys(prompt.cache_salt, prompt.lora_name), extra_keys(None, prompt.lora_name)
        widths = block_widths(prompt.packed[done_blocks * size * ID_BYTES :], size)
        for at in range(done_blocks, len(prompt.ids) // size, step):
            ids, of_run = prompt.ids[at * size : (at + step) * size], widths[at - done_blocks : at - done_blocks + step]
            run: _Run | None = prompt.run(parent, at * size, (at + step) * size)
            hashes = run_hashes(parent, ids, of_run, extra if at else salted, extra) if of_run else []
            if not hashes:
                run, hashes = None, hashes_one_by_one(parent, ids, size, extra if at else salted, extra)
            yield run, hashes
            parent = hashes[-1]


class _Prompt(NamedTuple):
    ids: tuple[int, ...]
    """Of the full blocks."""
    packed: bytes
    """`pack_ids` of them; empty when they can't be."""
    cache_salt: str | None
    lora_name: str | None

    def run(self, parent: bytes, begin: int, end: int) -> "_Run":
        """Name of the run of tokens `begin` to `end`, whose first block has this parent."""
        packed = self.packed[begin * ID_BYTES : end * ID_BYTES]
        return _Run(parent, packed, None if begin else self.cache_salt, self.lora_name)


class _Run(NamedTuple):
    """Names a run of blocks together with all that went before it."""

    parent: bytes
    packed: bytes
    cache_salt: str | None
    """None after the first run: the parent's hash tells the salt already."""
    lora_name: str | None


class _Known(NamedTuple):
    keys: tuple[bytes, ...]
    last_hash: bytes
