"""The history of routed blocks: leading blocks, sizes, homes and the cap."""

import random
from collections import Counter

from serve_app.router.choice import ReplicaView
from serve_app.router.routed_history import RoutedHistory

BLOCK = 16


def keys(*names: int) -> list[bytes]:
    return [name.to_bytes(8, "big") for name in names]


def views(replica_ids: str) -> list[ReplicaView]:
    return [ReplicaView(one, 0, 100, 0, 0.1, 0.0, 0.0, 0.0, 0.0, 0) for one in replica_ids]


def test_view_tells_leading_blocks_and_distinct_blocks() -> None:
    history = RoutedHistory(1_000)
    history.record("a", keys(1, 2, 3))
    history.record("a", keys(1, 2, 4))
    history.record("b", keys(1, 9))
    seen = history.seen(views("abc"), keys(1, 2, 5), BLOCK)
    assert [(one.replica_id, one.routed_tokens, one.history_blocks) for one in seen] == [
        ("a", 32, 4),
        ("b", 16, 2),
        ("c", 0, 0),
    ]
    assert history.hit_blocks(keys(1, 2, 5)) == {"a": 2, "b": 1}
    assert [one.routed_tokens for one in history.seen(views("ab"), [], BLOCK)] == [0, 0]
    assert history.seen([], keys(1), BLOCK) == []


def test_prompt_recorded_again_adds_nothing() -> None:
    history = RoutedHistory(1_000)
    for _ in range(3):
        history.record("a", keys(1, 2, 3))
    assert history.num_blocks("a") == 3
    history.check_integrity({"a"})


def test_home_of_a_prefix_is_fixed_and_differs_among_prefixes() -> None:
    history = RoutedHistory(10_000)
    homes = Counter[str]()
    for prefix in range(400):
        for replica_id in "abcd":
            history.record(replica_id, keys(prefix, 1_000 + prefix))
        seen = [history.seen(views("abcd"), keys(prefix, 1_000 + prefix, tail), BLOCK) for tail in (9_001, 9_002)]
        assert [one.home_order for one in seen[0]] == [one.home_order for one in seen[1]]
        homes[min(seen[0], key=lambda one: one.home_order).replica_id] += 1
    assert min(homes[replica_id] for replica_id in "abcd") > 70


def test_order_follows_the_candidates_that_are_there() -> None:
    history = RoutedHistory(1_000)
    history.record("gone", keys(1, 2, 3))
    history.record("a", keys(1))
    (alone,) = history.seen(views("a"), keys(1, 2, 3), BLOCK)
    (shorter,) = history.seen(views("a"), keys(1), BLOCK)
    assert (alone.home_order, alone.routed_tokens) == (shorter.home_order, 16)


def test_oldest_blocks_of_the_largest_history_go_over_the_cap() -> None:
    rng, history = random.Random(0), RoutedHistory(200)
    for i in range(300):
        start = rng.randrange(1_000_000)
        history.record("ab"[i % 3 == 0], keys(*range(start, start + rng.randrange(1, 30))))
        history.check_integrity({"a", "b"})
    newest = history.seen(views("a"), keys(start), BLOCK)
    assert history.num_blocks("a") + history.num_blocks("b") <= 200
    assert newest[0].routed_tokens == BLOCK


def test_dropped_replica_and_emptied_history_know_nothing() -> None:
    history = RoutedHistory(1_000)
    history.record("a", keys(1, 2))
    history.record("b", keys(1))
    history.drop("a")
    history.check_integrity({"b"})
    assert [one.routed_tokens for one in history.seen(views("ab"), keys(1, 2), BLOCK)] == [0, 16]
    history.forget_all()
    history.check_integrity(frozenset())
    assert history.num_blocks("b") == 0
