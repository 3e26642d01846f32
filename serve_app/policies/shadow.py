"""Would LRU or RLT hit more? Two shadow caches answer for a pool that can only run one policy at a time.

A shadow holds hashes and no KV blocks. Each sees the prompts that the pool admits, one after the other, and counts the
blocks that its policy would have hit. The lead of LRU, in pools, is kept in a band: what was learned long ago can be
unlearned within `2 x LEAD_BOUND` pools of hits to the contrary. Source: set dueling (Qureshi et al., "Adaptive
insertion policies for high performance caching", ISCA 2007) over whole caches; the band and the share are ours.

Shadows are sampled along the chains, every 4th block of each prompt from a place that its root decides, into caches of
a quarter of the pool. Sampled by tree, as sets are, a few trees too many or too few would decide whether a working set
fits; along the chains each tree counts with its size. Cost: O(prompt blocks / 4) a request, O(pool / 4) hashes.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Protocol

from serve_app.policies.rlt import RltFreeBlocks

SAMPLE_EVERY = 4
FULL_LEAD = 0.2
"""LRU's lead, in pools of blocks hit, that decides all for it; as far behind, all is decided against it."""
LEAD_BOUND = 2 * FULL_LEAD
START_LEAD = -FULL_LEAD
"""Where little is known RLT is the safer one: it is never far behind, and LRU may hit nothing."""


class ShadowCache(Protocol):
    def resize(self, num_blocks: int) -> None:
        """Hold at most so many blocks from now on, not more than at first."""

    def admit(self, chain: Sequence[bytes]) -> int:
        """Cache a prompt's blocks, its root first, and release them; returns how many were hit."""


class LruShadow:
    """What vLLM's own order would keep: its blocks hit first, then all touched from the chain's end to its root."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def resize(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def admit(self, chain: Sequence[bytes]) -> int:
        order = self._order
        num_hit = next((index for index, block_hash in enumerate(chain) if block_hash not in order), len(chain))
        for block_hash in reversed(chain):
            order[block_hash] = None
            order.move_to_end(block_hash)
        while len(order) > self._num_blocks:
            order.popitem(last=False)
        return num_hit


class RltShadow:
    """What RLT would keep."""

    def __init__(self, num_blocks: int, rng: Random) -> None:
        self._free = RltFreeBlocks(num_blocks, range(num_blocks), rng)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._held: list[int] = []
        """Blocks that hold nothing and are kept out of the cache."""

    def resize(self, num_blocks: int) -> None:
        num_more = len(self._hash_of) - num_blocks - len(self._held)
        if num_more > 0:
            self._held += self._take(num_more)
        elif num_more < 0:
            self._free.release(self._held[num_more:])
            del self._held[num_more:]

    def admit(self, chain: Sequence[bytes]) -> int:
        free, block_of, hash_of = self._free, self._block_of, self._hash_of
        free.begin_step()
        chain = chain[: len(hash_of) - len(self._held)]
        blocks = []
        for block_hash in chain:
            block = block_of.get(block_hash)
            if block is None:
                break
            free.claim(block)
            blocks.append(block)
        num_hit = len(blocks)
        new = self._take(len(chain) - num_hit)
        for block, block_hash in zip(new, chain[num_hit:], strict=True):
            hash_of[block] = block_hash
            block_of[block_hash] = block
        free.cache_chain(new, blocks[-1] if blocks else None)
        free.release(reversed(blocks + new))
        return num_hit

    def _take(self, num: int) -> list[int]:
        """Blocks for other content; what they hold is forgotten."""
        taken, hash_of = self._free.take(num), self._hash_of
        for block in taken:
            old = hash_of[block]
            if old is not None:
                del self._block_of[old]
                hash_of[block] = None
        return taken


class Duel:
    """How much of the eviction should be LRU's, from what the two shadows hit."""

    def __init__(self, num_blocks: int, rng: Random, sample_every: int = SAMPLE_EVERY) -> None:
        """Args: num_blocks: of the pool. sample_every: blocks of a chain for each that the shadows see, at least 1."""
        self._num_blocks = num_blocks
        self._sample_every = sample_every
        shadow_blocks = max(1, num_blocks // sample_every)
        self._lru: ShadowCache = LruShadow(shadow_blocks)
        self._rlt: ShadowCache = RltShadow(shadow_blocks, rng)
        self.lead = START_LEAD
        """Blocks that LRU hit more than RLT, in pools, within plus or minus `LEAD_BOUND`."""

    def observe(self, chain: Sequence[bytes], num_cache_blocks: int) -> None:
        """A prompt is admitted.

        Args:
            chain: the hashes of its full blocks, its root first.
            num_cache_blocks: blocks of the pool that are free or hold a piece of a chain. The others are running
                requests' partial blocks, which is what decides whether a working set that just fits does.
        """
        if not chain:
            return
        for shadow in (self._lru, self._rlt):
            shadow.resize(max(1, num_cache_blocks // self._sample_every))
        sampled = chain[chain[0][-1] % self._sample_every :: self._sample_every]
        blocks_ahead = self._sample_every * (self._lru.admit(sampled) - self._rlt.admit(sampled))
        self.lead = min(max(self.lead + blocks_ahead / self._num_blocks, -LEAD_BOUND), LEAD_BOUND)

    def lru_share(self) -> float:
        """Share of the evictions that LRU should choose: 0 up to a lead of minus `FULL_LEAD`, 1 from plus that on.

        In between it is the square root of the way: where neither is much better a mixture is close to both, so half
        is reached soon, and the rest takes more evidence.
        """
        return math.sqrt(min(max(0.5 + 0.5 * self.lead / FULL_LEAD, 0.0), 1.0))
