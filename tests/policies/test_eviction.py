"""One contract for both free lists, RLT against its slow reference, and its laws."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from serve_app.policies import FreeBlocks, LruFreeBlocks, RltFreeBlocks
from tests.policies.slow_references import SlowRlt

NUM_BLOCKS = 24
MakeFree = Callable[[int], FreeBlocks]


def lru(num_blocks: int) -> FreeBlocks:
    return LruFreeBlocks(num_blocks, range(num_blocks))


def rlt(num_blocks: int, seed: int = 0) -> RltFreeBlocks:
    return RltFreeBlocks(num_blocks, range(num_blocks), Random(seed))


each_policy = pytest.mark.parametrize("make", [lru, rlt])


def cached_chain(free: FreeBlocks, length: int, after: int | None = None) -> list[int]:
    """Take and cache `length` blocks as one chain, used."""
    chain = free.take(length)
    for parent, block in zip([after, *chain], chain, strict=False):
        free.cache(block, parent)
    return chain


@each_policy
def test_fresh_pool_hands_out_every_block_once_from_the_front(make: MakeFree) -> None:
    free = make(NUM_BLOCKS)
    assert free.num_free == NUM_BLOCKS
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
def test_misuse_is_refused_by_block_and_state(make: MakeFree) -> None:
    free = make(3)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        free.take(4)
    with pytest.raises(ValueError, match="block 1 is already free"):
        free.release([1])
    free.take(2)
    with pytest.raises(ValueError, match="block 1 is not free"):
        free.claim(1)
    free.check_integrity()


@each_policy
def test_free_cached_block_that_is_uncached_stays_free(make: MakeFree) -> None:
    free = make(3)
    chain = cached_chain(free, 3)
    free.release(reversed(chain))
    free.uncache(chain[1])
    free.uncache(chain[1])
    assert free.num_free == 3
    assert not free.is_cached(chain[1])
    assert sorted(free.free_blocks()) == [0, 1, 2]
    free.check_integrity()
    assert sorted(free.take(3)) == [0, 1, 2]


def test_lru_evicts_the_least_recently_released_tail_first() -> None:
    free = lru(6)
    first, second = cached_chain(free, 3), cached_chain(free, 3)
    free.release(reversed(second))
    free.release(reversed(first))
    assert free.take(6) == [*reversed(second), *reversed(first)]


def test_rlt_equals_its_slow_reference_over_random_operations() -> None:
    for seed in range(40):
        random_operations_agree(seed, num_operations=250)


def random_operations_agree(seed: int, num_operations: int) -> None:
    """Drive RLT and its reference as a block pool would; a draw has to be one that the reference allows."""
    rng = Random(seed)
    fast, slow = rlt(NUM_BLOCKS, seed), SlowRlt(NUM_BLOCKS)
    requests: list[list[int]] = []
    for _ in range(num_operations):
        operation = rng.choice(["start", "start", "finish", "hit", "touch", "uncache", "step", "recache"])
        if operation == "start":
            chain: list[int] = []
            for _ in range(min(rng.randint(1, 8), fast.num_free)):
                allowed = slow.allowed_draws()
                [block] = fast.take(1)
                assert block in allowed
                slow.take(block)
                chain.append(block)
            requests.append(chain)
            # The last block of a chain is partial now and then, and a parent may be one that was lost.
            for parent, block in zip([None, *chain], chain[: len(chain) - rng.randint(0, 1)], strict=False):
                fast.cache(block, parent)
                slow.cache(block, parent)
        elif operation == "finish" and requests:
            chain = requests.pop(rng.randrange(len(requests)))
            fast.release(reversed(chain))
            slow.release(reversed(chain))
        elif operation == "hit" and slow.free_cached():
            block = rng.choice(sorted(slow.free_cached()))
            fast.claim(block)
            slow.claim(block)
            requests.append([block])
        elif operation == "touch":
            blocks = rng.sample(sorted(slow.free_cached()), min(2, len(slow.free_cached())))
            fast.touch(blocks)
            slow.touch(blocks)
        elif operation == "uncache" and slow.parent and rng.random() < 0.3:
            block = rng.choice(sorted(slow.parent))
            fast.uncache(block)
            slow.uncache(block)
        elif operation == "recache" and requests and requests[-1]:
            block, parent = requests[-1][0], rng.randrange(NUM_BLOCKS)
            if block not in descent(slow, parent):
                fast.cache(block, parent)
                slow.cache(block, parent)
        elif operation == "step":
            fast.begin_step()
            slow.touched_this_step.clear()
        fast.check_integrity()
        assert {b for b in range(NUM_BLOCKS) if not fast.is_free(b)} == slow.used
        assert {b for b in range(NUM_BLOCKS) if fast.is_cached(b)} == set(slow.parent)
        assert fast.num_free == NUM_BLOCKS - len(slow.used)


def descent(slow: SlowRlt, block: int | None) -> set[int]:
    """`block` and its ancestors."""
    found: set[int] = set()
    while block is not None:
        found.add(block)
        block = slow.parent.get(block)
    return found


@each_policy
def test_free_block_that_becomes_cached_is_kept_longer_than_an_uncached_one(make: MakeFree) -> None:
    free = make(3)
    free.release(free.take(3))
    free.cache(0, None)
    free.cache(1, 0)
    free.check_integrity()
    assert free.num_free == 3
    if isinstance(free, RltFreeBlocks):
        assert free.take(3) == [2, 1, 0]


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


def test_rlt_never_evicts_a_block_with_a_cached_child() -> None:
    for seed in range(50):
        free = rlt(12, seed)
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


def test_rlt_evicts_a_parent_when_all_its_descendants_are_in_use() -> None:
    free = rlt(2)
    parent, child = cached_chain(free, 2)
    free.release([parent])
    assert free.take(1) == [parent]
    free.check_integrity()
    free.release([child])
    assert free.take(1) == [child]


def test_rlt_child_of_a_lost_parent_has_none_though_the_parent_is_cached_again() -> None:
    free = rlt(3)
    parent, child = cached_chain(free, 2)
    free.uncache(parent)
    free.cache(parent, None)
    free.release([child, parent])
    free.check_integrity()
    assert {parent, child} == set(free.take(3)[1:])
    free.check_integrity()


def test_rlt_repeats_its_draws_for_a_seed_and_differs_for_another() -> None:
    def draws(seed: int) -> list[int]:
        free = rlt(64, seed)
        blocks = free.take(64)
        for block in blocks:
            free.cache(block, None)
        free.release(blocks)
        return free.take(64)

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
