"""How much of each waiting request is cached, kept current by following which KV blocks come and go.

A request is looked up once when it is followed, by a search over its block hashes. From then on only two blocks decide
whether its hit changes: the first that it lacks, and the deepest that it has, since a block leaves the cache before the
block that it continues (a request's blocks are freed from the last to the first, and RLT evicts leaves). So each
request watches those two hashes, and is looked up again when one of them appears or disappears. `reset_prefix_cache`
has everything looked up again, and so has what may cut a hole (`evict_blocks`, and a free list that had to orphan a
block, see `FreeBlocks.num_orphanings`); after that every block of a hit is watched, until the cache is reset.

A model that is not one group of full attention is asked anew through vLLM's coordinator at every step, O(its blocks).
Cost: O(1) a block that comes or goes, O(log blocks) a request that it concerns.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request

from serve_app.policies.eviction import FreeBlocks
from serve_app.policies.prefix_search import longest_prefix
from serve_app.policies.vllm_hooks.block_pool import is_full_attention

Watchers = defaultdict[BlockHashWithGroupId, set[int]]


class WatchedBlockMap(BlockHashToBlockMap):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's map from block hash to blocks, noting the watchers of a hash that appears or disappears."""

    watchers: Watchers
    touched: set[int]

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        super().insert(key, block)
        if key in self.watchers:
            self.touched |= self.watchers[key]

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        if key in self.watchers:
            self.touched |= self.watchers[key]
        return super().pop(key, block_id)


@dataclass(slots=True)
class _Followed:
    request: Request
    hit_tokens: int = 0
    is_new: bool = True
    """Not looked up yet. Most requests start in their first step, so watching begins at the second look-up."""
    watched: tuple[BlockHashWithGroupId, ...] = ()


class CachedPrefixes:
    """The cached prefix of each followed request, by a number that the caller chooses: its row."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._block_tokens: int = self._pool.hash_block_size
        self._searches = is_full_attention(manager) and not manager.coordinator.eagle_group_ids
        self._may_have_holes = False
        self._free: FreeBlocks | None = None
        self._num_orphanings = 0
        self._followed: dict[int, _Followed] = {}
        self._watchers: Watchers = defaultdict(set)
        self._touched: set[int] = set()
        self._again: set[int] = set()
        """Rows to look up at the next step whatever happens."""
        self._map: BlockHashToBlockMap | None = None
        self._watch_map()
        self._watch_evictions()

    def follow(self, row: int, request: Request) -> None:
        """Follow this request; `update` will answer its hit."""
        self._followed[row] = _Followed(request)
        self._touched.add(row)

    def forget(self, row: int) -> None:
        """Raises KeyError unless the row is followed."""
        self._unwatch(row, self._followed.pop(row))
        self._touched.discard(row)
        self._again.discard(row)

    def look_again(self, row: int) -> None:
        """The request itself has changed; `update` will answer its hit."""
        self._touched.add(row)

    def update(self) -> dict[int, int]:
        """Row -> tokens cached, of every request whose hit may have changed since the last call."""
        self._touched |= self._again
        self._again.clear()
        if self._pool.cached_block_hash_to_block is not self._map:
            self._watch_map()
            self._touched.update(self._followed)
            self._may_have_holes = False
            self._num_orphanings = self._orphanings()
        if self._num_orphanings != self._orphanings():
            self._touched.update(self._followed)
            self._may_have_holes, self._num_orphanings = True, self._orphanings()
        if not self._searches:
            self._touched.update(self._followed)
        touched = {row: self._look_up(row, self._followed[row]) for row in self._touched}
        self._touched.clear()
        # With nobody to tell, vLLM's own map is a little faster.
        self._pool.cached_block_hash_to_block.__class__ = WatchedBlockMap if self._watchers else BlockHashToBlockMap
        return touched

    def deepest_block(self, row: int) -> int | None:
        """Id of the last cached block behind the row's hit; None without one, or where the request holds its blocks."""
        one = self._followed[row]
        if not one.hit_tokens or one.request.num_computed_tokens:
            return None
        block = self._block(one.request, one.hit_tokens // self._block_tokens - 1)
        return None if block is None else int(block.block_id)

    def num_free_blocks_hit(self, row: int) -> int:
        """How many blocks of the row's hit nobody uses at the moment. O(blocks of the hit)."""
        one = self._followed[row]
        hit = (self._block(one.request, index) for index in range(one.hit_tokens // self._block_tokens))
        return sum(block is not None and block.ref_cnt == 0 for block in hit)

    def evicted_by(self, free: FreeBlocks | None) -> None:
        """The free list that evicts from now on; None: vLLM's own, which never evicts a block before its successors."""
        self._free = free
        self._num_orphanings = self._orphanings()

    def _orphanings(self) -> int:
        return self._free.num_orphanings if self._free is not None else 0

    def _look_up(self, row: int, one: _Followed) -> int:
        self._unwatch(row, one)
        request, is_new, one.is_new = one.request, one.is_new, False
        if request.num_computed_tokens:
            one.hit_tokens = int(request.num_computed_tokens)
        elif not self._manager.prefix_cache_lookup_enabled(request):
            one.hit_tokens = 0
        elif self._searches:
            self._search(row, one, is_new)
        else:
            # The last token is always computed, as its logits are needed.
            find = self._manager.coordinator.find_longest_cache_hit
            one.hit_tokens = int(find(request.block_hashes, request.num_tokens - 1)[1])
        return one.hit_tokens

    def _search(self, row: int, one: _Followed, is_new: bool) -> None:
        request = one.request
        max_blocks = (request.num_tokens - 1) // self._block_tokens
        hit_blocks = self._num_hit_blocks(request, max_blocks, one.hit_tokens // self._block_tokens)
        one.hit_tokens = hit_blocks * self._block_tokens
        if is_new:
            self._again.add(row)
            return
        decisive = range(hit_blocks + 1) if self._may_have_holes else (hit_blocks - 1, hit_blocks)
        one.watched = tuple(_key(request, index) for index in decisive if 0 <= index < max_blocks)
        for key in one.watched:
            self._watchers[key].add(row)

    def _num_hit_blocks(self, request: Request, max_blocks: int, guess: int) -> int:
        def is_cached(index: int) -> bool:
            return self._block(request, index) is not None

        if self._may_have_holes:
            return sum(1 for _ in takewhile(is_cached, range(max_blocks)))
        return longest_prefix(is_cached, max_blocks, guess)

    def _unwatch(self, row: int, one: _Followed) -> None:
        for key in one.watched:
            self._watchers[key].discard(row)
            if not self._watchers[key]:
                del self._watchers[key]
        one.watched = ()

    def _block(self, request: Request, index: int) -> KVCacheBlock | None:
        return self._pool.cached_block_hash_to_block.get_one_block(_key(request, index))

    def _watch_map(self) -> None:
        """The map changes its class, not its identity; the pool makes a new one when it is reset."""
        blocks = self._pool.cached_block_hash_to_block
        blocks.__class__ = WatchedBlockMap
        blocks.watchers, blocks.touched = self._watchers, self._touched
        self._map = blocks

    def _watch_evictions(self) -> None:
        evict_blocks = self._pool.evict_blocks

        def evict_and_look_again(block_ids: set[int]) -> Any:
            self._touched.update(self._followed)
            self._may_have_holes = True
            return evict_blocks(block_ids)

        self._pool.evict_blocks = evict_and_look_again

    def check_integrity(self) -> None:
        """Assert that exactly the followed rows watch, each what it says."""
        watching = {(key, row) for row, one in self._followed.items() for key in one.watched}
        assert watching == {(key, row) for key, rows in self._watchers.items() for row in rows}
        assert self._touched | self._again <= set(self._followed)
        assert {row for row, one in self._followed.items() if one.is_new} <= self._touched


def _key(request: Request, index: int) -> BlockHashWithGroupId:
    return make_block_hash_with_group_id(request.block_hashes[index], 0)
