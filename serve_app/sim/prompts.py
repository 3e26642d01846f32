"""Each prompt's block hashes, computed once for all runs over the same arrivals.

Router and engine hash a prompt with the same result, and one list of arrivals is run under many policies: without this,
hashing would be a third of a run. The hashes come out of the router's own `BlockHasher`, which asks vLLM.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from serve_app.router.block_hashes import BlockHasher, block_key
from serve_app.sim.arrivals import Arrival


@dataclass(frozen=True, slots=True)
class PromptHashes:
    """Of the prompt's full blocks, in order."""

    whole: list[bytes]
    """As the engine keeps them."""
    keys: tuple[bytes, ...]
    """As the router looks them up."""


class HashedPrompts:
    """Remembers every prompt that it has hashed, by request id; serves one list of arrivals."""

    def __init__(self, block_size_tokens: int) -> None:
        """Raises ValueError when block_size_tokens is not at least 1."""
        self.block_size_tokens = block_size_tokens
        self._hasher = BlockHasher(block_size_tokens)
        self._hash_request: Any = get_request_block_hasher(block_size_tokens, sha256)
        self._known: dict[str, PromptHashes] = {}

    def of(self, arrival: Arrival, token_ids: list[int]) -> PromptHashes:
        """The hashes of the arrival's prompt, whose token ids are Python integers."""
        known = self._known.get(arrival.request_id)
        if known is None:
            whole = self._hasher.whole_hashes(token_ids)
            known = self._known[arrival.request_id] = PromptHashes(whole, tuple(map(block_key, whole)))
        return known

    def request_hasher(self, prompt: PromptHashes) -> Callable[[Any], list[bytes]]:
        """What vLLM's `Request` calls for the hashes that it lacks: the prompt's are known, outputs' are computed."""

        def missing_hashes(request: Any) -> list[bytes]:
            if prompt.whole and not request.block_hashes:
                return prompt.whole
            hashes: list[bytes] = self._hash_request(request)
            return hashes

        return missing_hashes
