"""KV-block keys of a prompt, the same that an engine's KV events carry.

vLLM names a full KV block by a chained hash of its prefix: hash(parent, token ids, extra keys). Every hash here comes
out of vLLM's own `get_request_block_hasher` with the default algorithm, "sha256". The engine publishes a hash either
whole (32 bytes) or, by default in 0.29 (`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1`), as the integer of its last 8 bytes;
the key of a block is those 8 bytes, so both kinds of engine match without a setting. Among 4 million blocks two
distinct ones share a key with probability 4e-7, and the harm is one wrong routing hint.

The chain's root depends on `PYTHONHASHSEED` of each process: `seed_fingerprint` tells whether two processes agree. vLLM
is imported on first use, so that processes which only load the router's classes don't pay for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

KEY_BYTES = 8
"""Length of a block's key: what is left of a hash that vLLM publishes as an integer."""


def block_key(block_hash: bytes | int) -> bytes:
    """The key of a block whose hash vLLM published whole (bytes) or as an unsigned 64-bit integer.

    Raises:
        ValueError: fewer than 8 bytes, or an integer outside 0..2**64-1.
    """
    if isinstance(block_hash, int):
        if not 0 <= block_hash < 1 << (8 * KEY_BYTES):
            raise ValueError(f"block hash must be an unsigned 64-bit integer, got {block_hash}")
        return block_hash.to_bytes(KEY_BYTES, "big")
    if len(block_hash) < KEY_BYTES:
        raise ValueError(f"block hash must have at least {KEY_BYTES} bytes, got {block_hash!r}")
    return block_hash[-KEY_BYTES:]


def seed_fingerprint() -> str:
    """16 hex digits of the root of this process' hash chains; equal in two processes when their block keys can match.

    Reads `PYTHONHASHSEED` as vLLM does and leaves vLLM's global root alone, so an engine process may call it too.
    """
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    root: bytes = sha256(resolve_none_hash_seed(sha256))
    return root.hex()[:16]


@dataclass(slots=True)
class _Prompt:
    """What vLLM's hasher reads of a `Request`."""

    all_token_ids: Sequence[int]
    num_tokens: int
    cache_salt: str | None
    lora_request: SimpleNamespace | None
    mm_features: tuple[()] = ()
    prompt_embeds: None = None
    block_hashes: list[bytes] = field(default_factory=list)


class BlockHasher:
    """Hashes prompts at one block size. Cost: O(tokens), about 3 us a block of 16."""

    def __init__(self, block_size_tokens: int) -> None:
        """Args: block_size_tokens: as the engines resolved it. Raises: ValueError: not at least 1."""
        if block_size_tokens < 1:
            raise ValueError(f"block_size_tokens must be at least 1, got {block_size_tokens}")
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.block_size_tokens = block_size_tokens
        init_none_hash(sha256)
        self._hash_prompt: Any = get_request_block_hasher(block_size_tokens, sha256)

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
        return tuple(block_hash[-KEY_BYTES:] for block_hash in self.whole_hashes(token_ids, cache_salt, lora_name))

    def whole_hashes(
        self, token_ids: Sequence[int], cache_salt: str | None = None, lora_name: str | None = None
    ) -> list[bytes]:
        """As `hashes`, but what vLLM itself keeps with a request: 32 bytes each."""
        lora = SimpleNamespace(lora_name=lora_name) if lora_name else None
        whole: list[bytes] = self._hash_prompt(_Prompt(token_ids, len(token_ids), cache_salt, lora))
        return whole
