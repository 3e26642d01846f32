"""How much of a waiting request is cached."""

from collections.abc import Iterator

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import Request

from serve_app.policies.prefix_search import longest_prefix
from serve_app.policies.vllm_hooks.block_pool import is_full_attention


class PrefixLookup:
    """How many of a waiting request's tokens are cached, without a trace in vLLM's statistics or events.

    A full-attention model is asked block by block: cached blocks form prefixes, so a search from the last answer takes
    two look-ups when nothing changed. (Right after `evict_blocks` cut a hole, it may answer too much; that moves the
    request in the queue, no more.) Any other model is asked through vLLM's coordinator, in O(cached blocks).
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._coordinator = manager.coordinator
        self._searches = is_full_attention(manager) and not self._coordinator.eagle_group_ids
        self._hit_tokens: dict[str, int] = {}
        self._last_hit_tokens: dict[str, int] = {}
        self._is_new_step = True

    def begin_step(self) -> None:
        """Blocks may have come and gone: what was found until now is where the next search starts."""
        self._is_new_step = True

    def hit_tokens(self, requests: list[Request]) -> list[int]:
        """(n,), for each request, looked up once a step; forgets the requests that a whole step doesn't ask for."""
        if self._is_new_step:
            self._last_hit_tokens, self._hit_tokens, self._is_new_step = self._hit_tokens, {}, False
        for request in requests:
            if request.request_id not in self._hit_tokens:
                self._hit_tokens[request.request_id] = self._look_up(request)
        return [self._hit_tokens[request.request_id] for request in requests]

    def hit_blocks(self, requests: list[Request]) -> Iterator[Iterator[int]]:
        """For each request, the ids of the cached blocks behind `hit_tokens`, deepest first; full attention only."""
        block_tokens = self._manager.block_pool.hash_block_size
        for request, hit_tokens in zip(requests, self.hit_tokens(requests), strict=True):
            yield self._chain(request, hit_tokens // block_tokens)

    def _chain(self, request: Request, num_blocks: int) -> Iterator[int]:
        get_one_block, hashes = self._manager.block_pool.cached_block_hash_to_block.get_one_block, request.block_hashes
        deepest_first = range(num_blocks - 1, -1, -1)
        blocks = (get_one_block(make_block_hash_with_group_id(hashes[index], 0)) for index in deepest_first)
        return (block.block_id for block in blocks if block is not None)

    def _look_up(self, request: Request) -> int:
        if request.num_computed_tokens:
            return int(request.num_computed_tokens)
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        # The last token is always computed, as its logits are needed.
        max_hit_tokens = request.num_tokens - 1
        if not self._searches:
            return int(self._coordinator.find_longest_cache_hit(request.block_hashes, max_hit_tokens)[1])

        pool, hashes = self._manager.block_pool, request.block_hashes
        get_one_block = pool.cached_block_hash_to_block.get_one_block

        def is_cached(index: int) -> bool:
            return get_one_block(make_block_hash_with_group_id(hashes[index], 0)) is not None

        block_tokens = pool.hash_block_size
        last_hit_blocks = self._last_hit_tokens.get(request.request_id, 0) // block_tokens
        return int(longest_prefix(is_cached, max_hit_tokens // block_tokens, last_hit_blocks) * block_tokens)
