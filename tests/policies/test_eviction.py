"""One contract for every free list, each against its slow reference, and the laws of LRU and RLT."""

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import pytest

from serve_app.policies.adaptive import AdaptiveFreeBlocks
from serve_app.policies.eviction import FreeBlocks, LruFreeBlocks
from serve_app.policies.rlt import RltFreeBlocks
from serve_app.policies.shadow import Duel
from tests.policies.slow_references import SlowFreeBlocks

NUM_BLOCKS = 24
MakeFree = Callable[[int], FreeBlocks]


class FixedDuel(Duel):
    """A share that nothing changes."""

    def __init__(self, share: float) -> None:
        super().__init__(1, Random(0))
        self.share = share

    def lru_share(self) -> float:
        return self.share


def lru(num_blocks: int) -> FreeBlocks:
    return LruFreeBlocks(num_blocks, range(num_blocks))


def rlt(num_blocks: int, seed: int = 0) -> RltFreeBlocks:
    return RltFreeBlocks(num_blocks, range(num_blocks), Random(seed))


def adaptive(num_blocks: int, seed: int = 0, lru_share: float | None = None) -> AdaptiveFreeBlocks:
    duel = None if lru_share is None else FixedDuel(lru_share)
    return AdaptiveFreeBlocks(num_blocks, range(num_blocks), Random(seed), duel)


def half_lru(num_blocks: int) -> FreeBlocks:
    return adaptive(num_blocks, lru_share=0.5)


def all_lru(num_blocks: int) -> FreeBlocks:
    return adaptive(num_blocks, lru_share=1.0)


each_policy = pytest.mark.parametrize("make", [lru, rlt, adaptive, half_lru, all_lru])


def cached_chain(free: FreeBlocks, length: int, after: int | None = None) -> list[int]:
    """Take and cache `length` blocks as one chain, used."""
    chain = free.take(length)
    free.cache_chain(chain, after)
    return chain


@each_policy
def test_fresh_pool_hands_out_every_block_once_from_the_front(make: MakeFree) -> None:
    free = make(NUM_BLOCKS)
    assert free.num_free == NUM_BLOCKS
    assert free.take(0) == []
    assert free.take(NUM_BLOCKS) == list(range(NUM_BLOCKS))
    assert free.num_free == 0
    free.check_integrity()


@each_policy
def test_uncached_blocks_go_before_any_cached_one(make: MakeFree) -> None:
    free = make(6)
    chain = cached_chain(free, 3)
    free.release(reversed(chain))
    assert set(free.take(3)).isdisjoint(chain)
    assert set(free.take(3)) == set(chain)


@each_policy
def test_uncached_blocks_are_reused_last_freed_first(make: MakeFree) -> None:
    free = make(6)
    taken = free.take(6)
    free.release(taken[:2])
    free.release(taken[2:5])
    assert free.free_blocks() == [2, 3, 4, 0, 1]
    assert free.take(5) == [2, 3, 4, 0, 1]


@each_policy
def test_claimed_block_keeps_its_content_and_comes_back(make: MakeFree) -> None:
    free = make(4)
    [block] = cached_chain(free, 1)
    free.release([block])
    free.claim(block)
    assert not free.is_free(block)
    assert free.is_cached(block)
    free.release([block])
    assert free.take(4)[-1] == block
    assert not free.is_cached(block)
    free.check_integrity()


@each_policy
def test_misuse_is_refused_by_block_and_state_and_leaves_the_law_intact(make: MakeFree) -> None:
    free = make(3)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        free.take(4)
    with pytest.raises(ValueError, match="block 1 is already free"):
        free.release([1])
    used = free.take(2)
    with pytest.raises(ValueError, match="block 1 is not free"):
        free.claim(1)
    with pytest.raises(ValueError, match="block 1 is not pinned"):
        free.unpin(1)
    with pytest.raises(ValueError, match="block 2 is already free"):
        free.release([*used, 2])
    free.check_integrity()
    assert free.num_free == 3


@each_policy
def test_free_cached_block_that_is_uncached_stays_free_and_goes_next(make: MakeFree) -> None:
    free = make(3)
    chain = cached_chain(free, 3)
    free.release(reversed(chain))
    free.uncache(chain[1])
    free.uncache(chain[1])
    assert free.num_free == 3
    assert not free.is_cached(chain[1])
    assert sorted(free.free_blocks()) == [0, 1, 2]
    free.check_integrity()
    assert free.take(1) == [chain[1]]
    assert sorted(free.take(2)) == [0, 2]


@each_policy
def test_free_block_that_becomes_cached_is_kept_longer_than_an_uncached_one(make: MakeFree) -> None:
    free = make(3)
    free.release(free.take(3))
    free.cache(0, None)
    free.cache(1, 0)
    free.check_integrity()
    assert free.num_free == 3
    assert free.take(3) == [2, 1, 0]


@each_policy
def test_chain_cached_at_once_equals_one_cached_block_by_block(make: MakeFree) -> None:
    at_once, one_by_one = make(12), make(12)
    for free in (at_once, one_by_one):
        old = cached_chain(free, 3)
        free.release(reversed(old))  # the parent below is free and a leaf, the second block free and uncached
        blocks = free.take(4)
        free.release([blocks[1]])
        if free is at_once:
            free.cache_chain(blocks, old[-1])
        else:
            for parent, block in zip([old[-1], *blocks], blocks, strict=False):
                free.cache(block, parent)
        free.check_integrity()
    assert at_once.free_blocks() == one_by_one.free_blocks()


@each_policy
def test_block_with_a_cached_child_is_not_evicted_before_it(make: MakeFree) -> None:
    for _ in range(50):
        free = make(12)
        trunk = cached_chain(free, 4)
        branches = [cached_chain(free, 4, after=trunk[-1]), cached_chain(free, 4, after=trunk[1])]
        for chain in (trunk, *branches):
            free.release(reversed(chain))
        evicted = free.take(12)
        for chain in (trunk, *branches):
            places = [evicted.index(block) for block in chain]
            assert places == sorted(places, reverse=True)
        assert evicted.index(branches[0][0]) < evicted.index(trunk[3])
        assert evicted.index(branches[1][0]) < evicted.index(trunk[1])


@each_policy
def test_parent_goes_when_all_its_descendants_are_in_use(make: MakeFree) -> None:
    free = make(2)
    parent, child = cached_chain(free, 2)
    free.release([parent])
    assert free.take(1) == [parent]
    free.check_integrity()
    free.release([child])
    assert free.take(1) == [child]


@each_policy
def test_child_of_a_lost_parent_has_none_though_the_parent_is_cached_again(make: MakeFree) -> None:
    free = make(3)
    parent, child = cached_chain(free, 2)
    free.uncache(parent)
    free.cache(parent, None)
    free.release([child, parent])
    free.check_integrity()
    assert {parent, child} == set(free.take(3)[1:])
    free.check_integrity()


@each_policy
def test_pinned_block_and_its_ancestors_outlive_all_others(make: MakeFree) -> None:
    for _ in range(30):
        free = make(12)
        needed, other = cached_chain(free, 6), cached_chain(free, 6)
        free.release([*reversed(needed), *reversed(other)])
        free.begin_step()
        free.pin(needed[3])
        free.check_integrity()
        # The needed chain's own end, past the pinned block, may go as well.
        assert set(free.take(8)) == {*other, *needed[4:]}
        free.check_integrity()
        assert free.take(4) == [needed[3], needed[2], needed[1], needed[0]]


@each_policy
def test_pins_are_counted_and_an_unpinned_block_counts_as_just_used(make: MakeFree) -> None:
    free = make(6)
    blocks = free.take(6)
    for block in blocks:
        free.cache(block, None)
    free.pin(blocks[0])
    free.pin(blocks[0])
    free.release(blocks)
    free.unpin(blocks[0])
    free.check_integrity()
    free.begin_step()
    assert blocks[0] not in free.take(3)
    free.begin_step()
    free.unpin(blocks[0])
    free.check_integrity()
    assert free.take(3)[-1] == blocks[0]
    with pytest.raises(ValueError, match=f"block {blocks[0]} is not pinned"):
        free.unpin(blocks[0])


@each_policy
def test_pin_stays_with_the_block_whatever_it_holds(make: MakeFree) -> None:
    free = make(4)
    chain = cached_chain(free, 4)
    free.pin(chain[1])
    free.release(reversed(chain))
    free.uncache(chain[1])  # its child loses its parent
    free.check_integrity()
    assert free.take(1) == [chain[1]]
    free.cache(chain[1], chain[0])
    free.release([chain[1]])
    free.check_integrity()
    assert set(free.take(2)) == set(chain[2:])
    free.unpin(chain[1])
    free.check_integrity()
    assert free.take(2) == [chain[1], chain[0]]


@each_policy
def test_pool_that_is_all_pinned_still_yields_every_block(make: MakeFree) -> None:
    free = make(8)
    chains = [cached_chain(free, 4), cached_chain(free, 4)]
    for chain in chains:
        free.release(reversed(chain))
        for block in chain:
            free.pin(block)
    evicted = free.take(8)
    assert sorted(evicted) == list(range(8))
    for chain in chains:
        assert [block for block in evicted if block in chain] == chain[::-1]
    free.check_integrity()


REFERENCES: dict[MakeFree, str] = {
    lru: "lru",
    rlt: "rlt",
    lambda num_blocks: adaptive(num_blocks, lru_share=0.0): "rlt",
    all_lru: "lru by call",
}


@pytest.mark.parametrize("make", REFERENCES)
def test_free_list_equals_its_slow_reference_over_random_operations(make: MakeFree) -> None:
    for seed in range(40):
        random_operations_agree(make(NUM_BLOCKS), SlowFreeBlocks(NUM_BLOCKS, REFERENCES[make]), seed, 250)


def test_mixture_keeps_the_conservation_law_over_random_operations() -> None:
    for seed in range(40):
        free, pool = half_lru(NUM_BLOCKS), SlowFreeBlocks(NUM_BLOCKS, "any leaf")
        random_operations_agree(free, pool, seed, 250, any_leaf=True)


def random_operations_agree(
    fast: FreeBlocks, slow: SlowFreeBlocks, seed: int, num_operations: int, any_leaf: bool = False
) -> None:
    """Drive a free list and its reference as a block pool would; a draw has to be one that the reference allows.

    any_leaf: the reference does not say which leaf, only that it is one.
    """
    rng = Random(seed)
    requests: list[list[int]] = []
    pinned: list[int] = []
    operations = ["start", "start", "finish", "hit", "pin", "unpin", "uncache", "step", "recache", "cache free"]
    for _ in range(num_operations):
        operation = rng.choice(operations)
        if operation == "start":
            chain: list[int] = []
            for _ in range(min(rng.randint(1, 8), fast.num_free)):
                allowed = slow.allowed_leaves() if any_leaf else slow.allowed_draws()
                [block] = fast.take(1)
                assert block in allowed
                slow.take(block)
                chain.append(block)
            requests.append(chain)
            # The last block of a chain is partial now and then.
            cached = chain[: len(chain) - rng.randint(0, 1)]
            fast.cache_chain(cached, None)
            for parent, block in zip([None, *cached], cached, strict=False):
                slow.cache(block, parent)
        elif operation == "finish" and requests:
            chain = requests.pop(rng.randrange(len(requests)))
            fast.release(reversed(chain))
            slow.release(chain[::-1])
        elif operation == "hit" and slow.free_cached():
            block = rng.choice(sorted(slow.free_cached()))
            fast.claim(block)
            slow.claim(block)
            requests.append([block])
        elif operation == "pin":
            pinned.append(rng.randrange(NUM_BLOCKS))
            fast.pin(pinned[-1])
            slow.pins[pinned[-1]] += 1
        elif operation == "unpin" and pinned:
            block = pinned.pop(rng.randrange(len(pinned)))
            fast.unpin(block)
            slow.unpin(block)
        elif operation == "uncache" and slow.parent and rng.random() < 0.3:
            block = rng.choice(sorted(slow.parent))
            fast.uncache(block)
            slow.uncache(block)
        elif operation == "recache" and requests and requests[-1]:
            block, parent = requests[-1][0], rng.randrange(NUM_BLOCKS)
            if block not in descent(slow, parent):
                fast.cache(block, parent)
                slow.cache(block, parent)
        elif operation == "cache free" and slow.uncached_stack and rng.random() < 0.2:
            # One block on the stack, as another moved by the swap would not keep its place.
            block = slow.uncached_stack[-1]
            fast.cache(block, None)
            slow.cache(block, None)
        elif operation == "step":
            fast.begin_step()
            slow.begin_step()
        fast.check_integrity()
        assert {b for b in range(NUM_BLOCKS) if not fast.is_free(b)} == slow.used
        assert {b for b in range(NUM_BLOCKS) if fast.is_cached(b)} == set(slow.parent)
        assert fast.num_free == NUM_BLOCKS - len(slow.used) == len(fast.free_blocks())


def descent(slow: SlowFreeBlocks, block: int | None) -> Iterator[int]:
    """`block` and its ancestors."""
    while block is not None:
        yield block
        block = slow.parent.get(block)


def test_lru_evicts_the_least_recently_released_tail_first() -> None:
    free = lru(6)
    first, second = cached_chain(free, 3), cached_chain(free, 3)
    free.release(reversed(second))
    free.release(reversed(first))
    assert free.take(6) == [*reversed(second), *reversed(first)]


def test_lru_keeps_a_trunk_as_long_as_it_was_used_last() -> None:
    free = lru(9)
    trunk = cached_chain(free, 3)
    old, new = cached_chain(free, 3, after=trunk[-1]), cached_chain(free, 3)
    free.release([*reversed(old), *reversed(trunk)])
    for block in trunk:
        free.claim(block)
    free.release(reversed(new))
    free.release(reversed(trunk))
    assert free.take(9) == [*reversed(old), *reversed(new), *reversed(trunk)]


def test_lru_that_is_hit_again_and_again_forgets_the_entries_that_no_longer_hold() -> None:
    free = LruFreeBlocks(200, range(200))
    blocks = free.take(200)
    for block in blocks:
        free.cache(block, None)
    free.release(blocks)
    for _ in range(20):
        for block in blocks:
            free.claim(block)
        free.release(blocks)
        free.check_integrity()  # which bounds them
    assert free.take(200) == blocks


def test_rlt_draws_uniformly_among_unmarked_leaves() -> None:
    free = rlt(9, seed=11)
    root, *leaves = free.take(9)
    draws: Counter[int] = Counter()
    free.cache(root, None)
    for leaf in leaves:
        free.cache(leaf, root)
    num_draws = 8_000
    for _ in range(num_draws):
        free.release([*leaves, root])
        [drawn] = free.take(1)
        draws[drawn] += 1
        free.cache(drawn, root)
        for block in (root, *leaves):
            if free.is_free(block):
                free.claim(block)
    assert set(draws) == set(leaves)
    expected = num_draws / len(leaves)
    chi_square = sum((draws[leaf] - expected) ** 2 / expected for leaf in leaves)
    assert chi_square < 24.3  # 99.9 % quantile at 7 degrees of freedom


def test_rlt_spares_what_was_released_in_this_phase() -> None:
    free = rlt(6)
    old, fresh = cached_chain(free, 3), cached_chain(free, 3)
    free.release(reversed(old))
    free.begin_step()
    assert set(free.take(1)) <= set(old)  # starts a phase, in which nothing else of `old` is marked
    free.release(reversed(fresh))
    free.begin_step()
    assert set(free.take(2)) <= set(old)
    assert set(free.take(2)) <= set(fresh)


def test_rlt_keeps_the_marks_of_this_step_when_a_phase_begins() -> None:
    free = rlt(6)
    old, fresh = cached_chain(free, 3), cached_chain(free, 3)
    free.release(reversed(old))
    free.begin_step()
    free.release(reversed(fresh))
    assert set(free.take(3)) == set(old)
    assert set(free.take(3)) == set(fresh)  # nothing else is left


@pytest.mark.parametrize("make", [rlt, adaptive])
def test_draws_repeat_for_a_seed_and_differ_for_another(make: Callable[[int, int], FreeBlocks]) -> None:
    def draws(seed: int) -> list[int]:
        free = make(64, seed)
        blocks = free.take(64)
        for block in blocks:
            free.cache(block, None)
        free.release(blocks)
        return free.take(64)

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
