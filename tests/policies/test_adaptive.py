"""The shadows against slow references, the duel's bounds, and what the adaptive eviction makes of requests."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from serve_app.policies.adaptive import AdaptiveFreeBlocks
from serve_app.policies.eviction import FreeBlocks, LruFreeBlocks
from serve_app.policies.rlt import RltFreeBlocks
from serve_app.policies.shadow import FULL_LEAD, LEAD_BOUND, Duel, LruShadow, RltShadow, ShadowCache
from tests.policies.test_eviction import adaptive

POOL_BLOCKS = 512
CHAIN_BLOCKS = 16
Chain = Sequence[bytes]


def chain_of(*path: object, length: int = CHAIN_BLOCKS) -> list[bytes]:
    """Hashes that name a chain; equal paths give equal chains."""
    rng = Random(repr(path))
    return [rng.randbytes(8) for _ in range(length)]


def in_turn(num_chains: int, num_requests: int) -> Iterator[Chain]:
    for number in range(num_requests):
        yield chain_of("in turn", number % num_chains)


def twice(gap: int, num_requests: int) -> Iterator[Chain]:
    """Each chain is asked for again after `gap` others, and never more: what was used lately is what is needed."""
    for number in range(num_requests // 2):
        yield chain_of("twice", number)
        yield chain_of("twice", number - gap)


class Cache:
    """A block pool that serves one request after the other from a free list."""

    def __init__(self, free: FreeBlocks) -> None:
        self.free = free
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.num_admitted = 0

    def admit(self, chain: Chain) -> int:
        self.free.begin_step()
        self.free.observe(chain)
        blocks = []
        for block_hash in chain:
            if block_hash not in self.block_of:
                break
            blocks.append(self.block_of[block_hash])
            self.free.claim(blocks[-1])
        num_hit = len(blocks)
        for block_hash in chain[num_hit:]:
            [block] = self.free.take(1)
            self.block_of.pop(self.hash_of.pop(block, b""), None)
            self.free.cache(block, blocks[-1] if blocks else None)
            self.block_of[block_hash], self.hash_of[block] = block, block_hash
            blocks.append(block)
        self.free.release(reversed(blocks))
        self.num_admitted += 1
        if self.num_admitted % 20 == 0:
            self.free.check_integrity()
        return num_hit


def num_hit(free: FreeBlocks, chains: Iterator[Chain]) -> int:
    cache = Cache(free)
    return sum(cache.admit(chain) for chain in chains)


class SlowLruCache:
    """LRU over hashes, the oldest found by search."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.age_order: list[bytes] = []

    def admit(self, chain: Chain) -> int:
        hits = [block_hash in self.age_order for block_hash in chain]
        self.age_order = [old for old in self.age_order if old not in chain] + list(reversed(chain))
        self.age_order = self.age_order[-self.num_blocks :]
        return [*hits, False].index(False)


@pytest.mark.parametrize("seed", range(5))
def test_lru_shadow_equals_its_slow_reference(seed: int) -> None:
    rng, shadow, slow = Random(seed), LruShadow(40), SlowLruCache(40)
    hits = 0
    for _ in range(300):
        chain = chain_of("trunk", length=3) + chain_of(rng.randrange(12), length=rng.randint(0, 8))
        found = shadow.admit(chain)
        assert found == slow.admit(chain)
        hits += found
    assert hits > 300


@pytest.mark.parametrize("seed", range(5))
def test_rlt_shadow_hits_what_a_pool_under_rlt_hits(seed: int) -> None:
    rng = Random(seed)
    shadow = RltShadow(40, Random(seed))
    pool = Cache(RltFreeBlocks(40, range(40), Random(seed)))
    hits = 0
    for _ in range(300):
        chain = chain_of("trunk", length=3) + chain_of(rng.randrange(12), length=rng.randint(0, 8))
        found = shadow.admit(chain)
        assert found == pool.admit(chain)
        hits += found
    assert hits > 300


@pytest.mark.parametrize("seed", range(5))
def test_shadows_that_shrink_and_grow_hold_what_they_may(seed: int) -> None:
    rng = Random(seed)
    lru, rlt = LruShadow(40), RltShadow(40, Random(seed))
    for _ in range(200):
        num_blocks = rng.randint(1, 40)
        for shadow in (lru, rlt):
            shadow.resize(num_blocks)
            shadow.admit(chain_of(rng.randrange(12), length=rng.randint(1, 8)))
        assert len(lru._order) <= num_blocks
        assert len(rlt._block_of) == sum(block_hash is not None for block_hash in rlt._hash_of) <= num_blocks
        rlt._free.check_integrity()
    for shadow in (lru, rlt):
        shadow.resize(40)
        assert [shadow.admit(chain_of("new", length=50)) for _ in range(2)] == [0, 40]


@pytest.mark.parametrize("shadow", [LruShadow(5), RltShadow(5, Random(0))])
def test_prompt_that_is_longer_than_the_cache_is_kept_in_part(shadow: ShadowCache) -> None:
    chain = chain_of("long", length=9)
    assert shadow.admit(chain) == 0
    assert shadow.admit(chain) == 5
    assert shadow.admit([]) == 0


def test_lead_stays_in_its_band_and_the_share_with_it() -> None:
    duel = Duel(POOL_BLOCKS, Random(0))
    assert duel.lru_share() == 0.0
    for chain in in_turn(40, 1_000):
        duel.observe(chain, POOL_BLOCKS)
        assert -LEAD_BOUND <= duel.lead <= LEAD_BOUND
    assert (duel.lead, duel.lru_share()) == (-LEAD_BOUND, 0.0)
    for chain in twice(14, 2_000):
        duel.observe(chain, POOL_BLOCKS)
        assert 0.0 <= duel.lru_share() <= 1.0
        if duel.lead >= FULL_LEAD:
            break
    assert duel.lru_share() == 1.0
    duel.observe([], POOL_BLOCKS)
    assert duel.lead >= FULL_LEAD


def test_each_block_of_a_chain_is_sampled_for_some_root_into_a_quarter_of_the_pool() -> None:
    seen: list[list[bytes]] = []
    sizes: list[int] = []

    class Recorder:
        def resize(self, num_blocks: int) -> None:
            sizes.append(num_blocks)

        def admit(self, chain: Chain) -> int:
            seen.append(list(chain))
            return 0

    duel = Duel(POOL_BLOCKS, Random(0), sample_every=4)
    duel._lru = Recorder()
    for first_byte in range(4):
        duel.observe([bytes([first_byte]), b"b", b"c", b"d", b"e", b"f"], POOL_BLOCKS)
    assert seen == [[b"\x00", b"e"], [b"b", b"f"], [b"c"], [b"d"]]
    assert sizes == [POOL_BLOCKS // 4] * 4


def test_adaptive_follows_rlt_where_chains_are_asked_for_in_turn() -> None:
    chains = list(in_turn(36, 1_500))  # a little more than the pool holds
    lru = num_hit(LruFreeBlocks(POOL_BLOCKS, range(POOL_BLOCKS)), iter(chains))
    rlt = num_hit(RltFreeBlocks(POOL_BLOCKS, range(POOL_BLOCKS), Random(0)), iter(chains))
    free = adaptive(POOL_BLOCKS)
    found = num_hit(free, iter(chains))
    assert free.lru_share == 0.0
    assert lru == 0
    assert rlt > 0.5 * 1_500 * CHAIN_BLOCKS
    assert found > rlt - 0.02 * 1_500 * CHAIN_BLOCKS


def test_adaptive_follows_lru_where_only_what_is_recent_is_needed() -> None:
    chains = list(twice(14, 1_500))
    lru = num_hit(LruFreeBlocks(POOL_BLOCKS, range(POOL_BLOCKS)), iter(chains))
    rlt = num_hit(RltFreeBlocks(POOL_BLOCKS, range(POOL_BLOCKS), Random(0)), iter(chains))
    free = adaptive(POOL_BLOCKS)
    found = num_hit(free, iter(chains))
    assert free.lru_share == 1.0
    assert lru - rlt > 0.05 * 1_500 * CHAIN_BLOCKS
    assert found > lru - 0.02 * 1_500 * CHAIN_BLOCKS


def test_adaptive_beats_both_where_first_one_and_then_the_other_is_better() -> None:
    chains = [*in_turn(36, 800), *twice(14, 800), *in_turn(36, 800)]
    lru = num_hit(LruFreeBlocks(POOL_BLOCKS, range(POOL_BLOCKS)), iter(chains))
    rlt = num_hit(RltFreeBlocks(POOL_BLOCKS, range(POOL_BLOCKS), Random(0)), iter(chains))
    assert num_hit(adaptive(POOL_BLOCKS), iter(chains)) > max(lru, rlt)


def test_adaptive_equals_rlt_while_lru_does_not_lead() -> None:
    chains = list(in_turn(36, 400))
    rlt = Cache(RltFreeBlocks(POOL_BLOCKS, range(POOL_BLOCKS), Random(3)))
    ours = Cache(adaptive(POOL_BLOCKS, seed=3))
    assert [ours.admit(chain) for chain in chains] == [rlt.admit(chain) for chain in chains]


def test_partial_blocks_of_running_requests_are_no_room_for_the_shadows() -> None:
    sizes: list[int] = []

    class Recorder(Duel):
        def observe(self, chain: Chain, num_cache_blocks: int) -> None:
            sizes.append(num_cache_blocks)

    free = AdaptiveFreeBlocks(20, range(20), Random(0), Recorder(20, Random(0)))
    used = free.take(8)
    free.cache_chain(used[:5], None)
    free.observe([b"a"])
    free.release(used[6:])
    free.observe([b"b"])
    assert sizes == [17, 19]


def test_adaptive_hits_repeat_for_a_seed_and_differ_for_another() -> None:
    def hits(seed: int) -> list[int]:
        cache = Cache(adaptive(POOL_BLOCKS, seed))
        return [cache.admit(chain) for chain in in_turn(36, 300)]

    assert hits(1) == hits(1)
    assert hits(1) != hits(2)


@pytest.mark.parametrize("before", ["lru", "rlt", "adaptive"])
@pytest.mark.parametrize("after", ["lru", "rlt", "adaptive"])
def test_free_list_that_takes_over_holds_the_same_but_the_pins(before: str, after: str) -> None:
    rng = Random(5)
    old = free_list(before, POOL_BLOCKS, range(POOL_BLOCKS))
    cache = Cache(old)
    for _ in range(200):
        cache.admit(chain_of("trunk", length=5) + chain_of(rng.randrange(60), length=rng.randint(1, 20)))
    used = old.take(30)
    last = chain_of("last")
    cache.admit(last)
    old.cache_chain(used[:20], None)
    old.uncache(used[10])  # its child has no parent any more
    old.release(used[20:25])
    pinned = used[0]
    old.pin(pinned)
    new = free_list(after, POOL_BLOCKS, ())
    new.take_over(old)
    for free in (old, new):
        free.check_integrity()
    every = range(POOL_BLOCKS)
    assert [new.is_free(block) for block in every] == [old.is_free(block) for block in every]
    assert [new.is_cached(block) for block in every] == [old.is_cached(block) for block in every]
    old.unpin(pinned)  # the pin was the old one's
    new.check_integrity()
    evicted = new.take(new.num_free)
    new.check_integrity()
    if after == "lru":
        assert [cache.hash_of[block] for block in evicted[: -CHAIN_BLOCKS - 1 : -1]] == last
    if before == after == "lru":
        assert evicted == old.take(old.num_free)


def free_list(name: str, num_blocks: int, free: Sequence[int]) -> LruFreeBlocks | RltFreeBlocks:
    if name == "lru":
        return LruFreeBlocks(num_blocks, free)
    return (RltFreeBlocks if name == "rlt" else AdaptiveFreeBlocks)(num_blocks, free, Random(1))
