"""Blocks that open requests expect: the prefix index against a slow and obvious model, by name, and under the cap."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve_app.router.prefix_index import PrefixIndex

REPLICAS = st.sampled_from("abc")
REQUESTS = st.sampled_from(["r1", "r2", "r3", "r4"])
BLOCKS = st.lists(st.integers(0, 7), max_size=6)


def keys(*names: int) -> list[bytes]:
    return [name.to_bytes(8, "big") for name in names]


class IndexAgainstModel(RuleBasedStateMachine):
    """The model: copies by replica and block, and by open request the blocks that it still counts for."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(10_000)
        self.copies = {name: Counter[int]() for name in "abc"}
        self.claims: dict[str, tuple[str, set[int], float]] = {}
        self.now_s = 0.0

    def settle(self, replica_id: str, block: int) -> None:
        for claimed_on, blocks, _ in self.claims.values():
            if claimed_on == replica_id:
                blocks.discard(block)

    def expected(self, replica_id: str) -> set[int]:
        return {block for on, blocks, _ in self.claims.values() if on == replica_id for block in blocks}

    @rule(replica_id=REPLICAS, blocks=BLOCKS)
    def stored(self, replica_id: str, blocks: list[int]) -> None:
        self.index.stored(replica_id, keys(*blocks))
        self.copies[replica_id].update(blocks)
        for block in blocks:
            self.settle(replica_id, block)

    @rule(replica_id=REPLICAS, blocks=BLOCKS)
    def removed(self, replica_id: str, blocks: list[int]) -> None:
        self.index.removed(replica_id, keys(*blocks))
        for block in blocks:
            self.copies[replica_id][block] = max(0, self.copies[replica_id][block] - 1)
            self.settle(replica_id, block)

    @rule(replica_id=REPLICAS, forget=st.booleans())
    def lost_everything(self, replica_id: str, forget: bool) -> None:
        (self.index.drop if forget else self.index.clear)(replica_id)
        self.copies[replica_id].clear()
        for block in range(8):
            self.settle(replica_id, block)

    @rule(replica_id=REPLICAS, request_id=REQUESTS, blocks=BLOCKS, later_s=st.integers(0, 3))
    def expect(self, replica_id: str, request_id: str, blocks: list[int], later_s: int) -> None:
        self.now_s += later_s
        self.claims.pop(request_id, None)
        self.index.expect(replica_id, request_id, keys(*blocks), self.now_s)
        missing = {block for block in blocks if not self.copies[replica_id][block]}
        self.claims[request_id] = replica_id, missing, self.now_s

    @rule(request_id=REQUESTS)
    def unexpect(self, request_id: str) -> None:
        before = self.index.num_expected
        assert self.index.unexpect(request_id) == before - self.index.num_expected
        self.claims.pop(request_id, None)

    @rule(older_than_s=st.integers(0, 5))
    def expire(self, older_than_s: int) -> None:
        before = self.index.num_expected
        lost = self.index.expire_expected(self.now_s, older_than_s)
        assert lost == before - self.index.num_expected
        self.claims = {name: one for name, one in self.claims.items() if self.now_s - one[2] <= older_than_s}

    @invariant()
    def index_and_model_agree(self) -> None:
        held = {name: {b for b, n in self.copies[name].items() if n} | self.expected(name) for name in "abc"}
        for first in range(8):
            blocks = [first, *range(8)]
            lengths = {name: [*(b in held[name] for b in blocks), False].index(False) for name in "abc"}
            assert self.index.hit_blocks(keys(*blocks)) == {name: n for name, n in lengths.items() if n}
        assert self.index.num_expected == sum(len(self.expected(name)) for name in "abc")
        assert self.index.num_entries == sum(map(len, held.values()))
        self.index.check_integrity()


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_second_request_of_a_prefix_finds_it_before_any_event() -> None:
    index = PrefixIndex(1_000)
    index.stored("b", keys(1))
    index.expect("a", "r1", keys(1, 2, 3), 0.0)
    assert index.hit_blocks(keys(1, 2, 3, 4)) == {"a": 3, "b": 1}
    assert (index.num_expected, index.num_entries, index.num_blocks("a")) == (3, 4, 0)
    index.stored("a", keys(1, 2, 3))
    assert (index.num_expected, index.num_entries, index.num_blocks("a")) == (0, 4, 3)
    assert index.unexpect("r1") == 0
    assert index.hit_blocks(keys(1, 2, 3)) == {"a": 3, "b": 1}


def test_block_keeps_its_credit_until_the_last_request_that_expects_it_has_ended() -> None:
    index = PrefixIndex(1_000)
    for request_id in ("r1", "r2", "r3"):
        index.expect("a", request_id, keys(1, 2), 0.0)
    assert (index.unexpect("r1"), index.unexpect("r1"), index.unexpect("r3")) == (0, 0, 0)
    assert index.hit_blocks(keys(1, 2)) == {"a": 2}
    assert index.unexpect("r2") == 2
    assert index.hit_blocks(keys(1, 2)) == {}
    index.check_integrity()


def test_ended_request_takes_no_credit_that_a_younger_one_brought_after_a_removal() -> None:
    index = PrefixIndex(1_000)
    index.expect("a", "old", keys(1), 0.0)
    index.stored("a", keys(1))
    index.removed("a", keys(1))
    index.expect("a", "young", keys(1), 0.0)
    assert index.unexpect("old") == 0
    assert index.hit_blocks(keys(1)) == {"a": 1}


def test_request_routed_again_moves_its_expectation() -> None:
    index = PrefixIndex(1_000)
    index.expect("a", "r1", keys(1, 2), 0.0)
    index.expect("b", "r1", keys(1, 2), 1.0)
    assert index.hit_blocks(keys(1, 2)) == {"b": 2}
    index.check_integrity()


def test_expectations_expire_by_age_oldest_first() -> None:
    index = PrefixIndex(1_000)
    for number in range(10):
        index.expect("a", f"r{number}", keys(number), float(number))
    assert index.expire_expected(10.0, 10.0) == 0
    assert index.expire_expected(10.0, 6.5) == 4
    assert [bool(index.hit_blocks(keys(number))) for number in range(10)] == [False] * 4 + [True] * 6


def test_dropped_replica_takes_its_expectations_along_and_a_newcomer_inherits_none() -> None:
    index = PrefixIndex(1_000)
    index.expect("a", "r1", keys(1, 2), 0.0)
    index.drop("a")
    index.expect("b", "r2", keys(7), 0.0)
    assert index.hit_blocks(keys(1)) == {}
    assert (index.unexpect("r1"), index.num_expected) == (0, 1)
    index.check_integrity()


@pytest.mark.parametrize("cap", [1, 3, 40, 400])
def test_expectations_and_blocks_stay_under_the_cap_together(cap: int) -> None:
    index = PrefixIndex(cap)
    for number in range(200):
        start = 7 * number
        index.expect("ab"[number % 2], f"r{number % 50}", keys(*range(start, start + 30)), float(number))
        index.stored("ab"[number % 3 == 0], keys(*range(start, start + 9)))
        index.check_integrity()
        assert index.num_expected <= max(1, cap // 4)
    assert index.num_entries <= cap < index.num_forgotten


def test_prompt_longer_than_the_share_of_expectations_is_expected_by_its_leading_blocks() -> None:
    index = PrefixIndex(40)
    index.expect("a", "r1", keys(*range(30)), 0.0)
    assert index.hit_blocks(keys(*range(30))) == {"a": 10}
    index.expect("a", "r2", keys(100), 0.0)
    assert (index.hit_blocks(keys(0)), index.hit_blocks(keys(100))) == ({}, {"a": 1})
