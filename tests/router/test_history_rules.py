"""Cache-aware and prefix-affinity: every branch by hand, random candidates against a slow reference, Ray's own tree."""

import random
from collections import Counter

import pytest
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

from serve_app.config import PrefillTable, RouterSettings, RoutingDocument, RoutingWeights
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.baselines import HISTORY_RULES, RULES
from serve_app.router.choice import ReplicaView
from serve_app.router.decisions import RouteRequest
from serve_app.router.routing_state import RoutingState
from tests.router.rule_views import PROMPT_TOKENS, first_picks, random_views

WEIGHTS = RoutingWeights()
BLOCK = 16
REPLICAS = ["a", "b", "c", "d"]
CACHE_AWARE = {f"cache-aware-{threshold}": threshold for threshold in (0.3, 0.4, 0.5)}
AFFINITY = {"prefix-affinity": float("inf"), "prefix-affinity-8": 8.0}
TABLE = PrefillTable(
    device="test", model="test", dtype="test", vllm_version="test", date="2026-01-01", tokens=(1, 2), seconds=(0.1, 0.2)
)


def view(
    replica_id: str, num_open: int = 0, routed_tokens: int = 0, history_blocks: int = 0, home_order: int = 0
) -> ReplicaView:
    empty = (0, PROMPT_TOKENS, 0, 0.1, 0.0, 0.0, 0.0, 0.0)
    return ReplicaView(replica_id, *empty, num_open, routed_tokens, history_blocks, home_order)


def ids(name: str, *views: ReplicaView, seed: int = 0) -> list[str]:
    return [terms.replica_id for terms in RULES[name](WEIGHTS, views, random.Random(seed), 0)]


def state_of(router: str, **settings: float) -> RoutingState:
    document = RoutingDocument.model_validate({"router": router})
    state = RoutingState(RouterSettings.model_validate({"routing": document, **settings}), PrefillProfile(TABLE), BLOCK)
    state.set_replicas(REPLICAS)
    return state


def keys(*names: int) -> tuple[bytes, ...]:
    return tuple(name.to_bytes(8, "big") for name in names)


def request(request_id: str, *blocks: int) -> RouteRequest:
    return RouteRequest(request_id, BLOCK * len(blocks), keys(*blocks))


@pytest.mark.parametrize("name", CACHE_AWARE)
def test_cache_aware_ranks_by_open_requests_alone_when_load_is_uneven(name: str) -> None:
    busy_home = view("a", num_open=33, routed_tokens=96)
    assert ids(name, busy_home, view("c", history_blocks=9), view("b", num_open=1)) == ["c", "b", "a"]
    assert ids(name, busy_home, view("c"), view("b")) == ["b", "c", "a"]


@pytest.mark.parametrize("name", CACHE_AWARE)
def test_cache_aware_calls_load_even_at_a_difference_of_32_or_a_ratio_of_1_0001(name: str) -> None:
    assert ids(name, view("a", num_open=32, routed_tokens=96), view("b"))[0] == "a"
    assert ids(name, view("a", num_open=500_050, routed_tokens=96), view("b", num_open=500_000))[0] == "a"
    assert ids(name, view("a", num_open=500_051, routed_tokens=96), view("b", num_open=500_000))[0] == "b"


@pytest.mark.parametrize(("name", "threshold"), CACHE_AWARE.items())
def test_cache_aware_follows_a_match_above_its_threshold_and_not_at_it(name: str, threshold: float) -> None:
    at = round(threshold * PROMPT_TOKENS)
    small = view("z", history_blocks=1)
    assert ids(name, view("a", routed_tokens=at + 1, history_blocks=9), small) == ["a", "z"]
    assert ids(name, view("a", routed_tokens=at, history_blocks=9), small) == ["z", "a"]
    assert ids(name, view("a", history_blocks=2), view("b", history_blocks=0), small) == ["b", "z", "a"]


def test_cache_aware_takes_a_shared_prefix_to_the_same_home_whatever_the_seed() -> None:
    one, other = view("a", routed_tokens=96, home_order=7), view("b", routed_tokens=96, home_order=3)
    assert {ids("cache-aware-0.5", one, other, view("c"), seed=seed)[0] for seed in range(20)} == {"b"}


@pytest.mark.parametrize(("name", "threshold"), CACHE_AWARE.items())
def test_cache_aware_agrees_with_a_slow_reference(name: str, threshold: float) -> None:
    branches = Counter[str]()
    for views, rng in random_views(seed=6, count=500):
        counts = sorted(one.num_open for one in views)
        longest = sorted(one.routed_tokens for one in views)[-1]
        if counts[-1] - counts[0] > 32 and 10_000 * counts[-1] > 10_001 * counts[0]:
            branch, allowed = "uneven", {min(first_picks(views, lambda one: one.num_open))}
        elif longest > threshold * PROMPT_TOKENS:
            at_best = first_picks(views, lambda one: -one.routed_tokens, lambda one: one.home_order)
            branch, allowed = "match", {min(at_best)}
        else:
            branch, allowed = "smallest", first_picks(views, lambda one: one.history_blocks)
        branches[branch] += 1
        assert RULES[name](WEIGHTS, views, rng, 0)[0].replica_id in allowed, branch
    assert min(branches[branch] for branch in ("uneven", "match", "smallest")) > 50, branches


def test_prefix_affinity_takes_the_longest_match_and_of_several_the_least_open() -> None:
    far = view("a", num_open=0, routed_tokens=48)
    assert ids("prefix-affinity", far, view("b", 900, 96), view("c", 800, 96)) == ["c", "b", "a"]


def test_prefix_affinity_follows_a_match_from_a_tenth_on() -> None:
    small = view("z", history_blocks=1)
    assert ids("prefix-affinity", view("a", routed_tokens=10, history_blocks=9), small)[0] == "a"
    assert ids("prefix-affinity", view("a", routed_tokens=9, history_blocks=9), small)[0] == "z"


def test_prefix_affinity_sends_news_to_the_smallest_history_and_of_several_to_the_least_open() -> None:
    views = [view("a", 5, history_blocks=2), view("b", 9, history_blocks=1), view("c", 4, history_blocks=1)]
    assert ids("prefix-affinity", *views) == ["c", "b", "a"]


def test_prefix_affinity_leaves_an_uneven_load_to_power_of_two_above_its_threshold_alone() -> None:
    for num_open, name, firsts in (
        (8, "prefix-affinity-8", {"a"}),
        (9, "prefix-affinity-8", {"b", "c"}),
        (9_999, "prefix-affinity", {"a"}),
    ):
        views = [view("a", num_open, routed_tokens=96), view("b"), view("c")]
        assert {ids(name, *views, seed=seed)[0] for seed in range(40)} == firsts
        if firsts == {"b", "c"}:
            by_two = RULES["power-of-two"]
            assert RULES[name](WEIGHTS, views, random.Random(5), 0) == by_two(WEIGHTS, views, random.Random(5), 0)


@pytest.mark.parametrize(("name", "threshold"), AFFINITY.items())
def test_prefix_affinity_agrees_with_a_slow_reference(name: str, threshold: float) -> None:
    branches = Counter[str]()
    for views, rng in random_views(seed=7, count=500):
        counts = sorted(one.num_open for one in views)
        longest = sorted(one.routed_tokens for one in views)[-1]
        if counts[-1] - counts[0] > threshold:  # a single longest queue loses to whatever is drawn beside it
            lone = counts.count(counts[-1]) == 1
            allowed = {one.replica_id for one in views if not lone or one.num_open < counts[-1]}
            branch = "uneven"
        elif longest >= 10:
            allowed = {min(first_picks(views, lambda one: -one.routed_tokens, lambda one: one.num_open))}
            branch = "match"
        else:
            allowed = {min(first_picks(views, lambda one: one.history_blocks, lambda one: one.num_open))}
            branch = "smallest"
        branches[branch] += 1
        assert RULES[name](WEIGHTS, views, rng, 0)[0].replica_id in allowed, branch
    assert min(branches["match"], branches["smallest"]) > 50
    assert (branches["uneven"] > 50) is (name == "prefix-affinity-8")


@pytest.mark.parametrize("name", sorted(HISTORY_RULES))
def test_prompt_whose_half_is_known_is_matched_below_one_half_alone(name: str) -> None:
    state = state_of(name)
    home = state.decide(request("first", *range(8)), REPLICAS, 0.0).replica_id
    second = state.decide(request("second", 0, 1, 2, 3, 90, 91, 92, 93), REPLICAS, 0.0)
    assert (second.replica_id == home) is (name != "cache-aware-0.5")


@pytest.mark.parametrize("name", sorted(HISTORY_RULES))
def test_prompt_goes_where_it_was_routed_although_no_engine_ever_reported_a_block(name: str) -> None:
    state = state_of(name)
    home = state.decide(request("0", *range(8)), REPLICAS, 0.0).replica_id
    for i in range(1, 5):
        decision = state.decide(request(f"{i}", *range(8)), REPLICAS, 0.0)
        assert decision.replica_id == home
    assert not any(state.index.num_blocks(one) for one in REPLICAS)
    assert {one: state.history.num_blocks(one) for one in REPLICAS} == {**dict.fromkeys(REPLICAS, 0), home: 8}
    state.check_integrity(0.0)


@pytest.mark.parametrize("name", sorted(HISTORY_RULES))
def test_prompt_routed_under_uneven_load_enters_the_history_too(name: str) -> None:
    state = state_of(name)
    for replica_id in "abc":
        for i in range(50):
            state.ledger.reserve(f"{replica_id}{i}", replica_id, 0.1, 0.0)
    homes = {state.decide(request(f"{i}", *range(8)), REPLICAS, 0.0).replica_id for i in range(20)}
    assert sum(state.history.num_blocks(one) for one in REPLICAS) == 8 * len(homes)
    assert homes == {"d"} or not name.startswith("cache-aware")


@pytest.mark.parametrize("name", sorted(HISTORY_RULES))
def test_history_leaves_with_its_replica(name: str) -> None:
    state = state_of(name)
    home = state.decide(request("0", *range(8)), REPLICAS, 0.0).replica_id
    state.set_replicas([one for one in REPLICAS if one != home])
    state.check_integrity(0.0)
    state.set_replicas(REPLICAS)
    assert state.history.num_blocks(home) == 0
    state.check_integrity(0.0)


@pytest.mark.parametrize("name", sorted(RULES.keys() - HISTORY_RULES))
def test_no_history_is_kept_under_other_rules(name: str) -> None:
    state = state_of(name)
    for i in range(20):
        state.decide(request(f"{i}", *range(8)), REPLICAS, 0.0)
    assert [state.history.num_blocks(one) for one in REPLICAS] == [0, 0, 0, 0]
    state.check_integrity(0.0)


def test_history_starts_empty_unless_it_is_taken_over_from_another_rule_that_keeps_one() -> None:
    state = state_of("cache-aware-0.5")
    for version, router, num_blocks in (
        (2, "prefix-affinity", 8),
        (3, "lbgr", 0),
        (4, "cache-aware-0.3", 0),
    ):
        state.decide(request(f"{version}", *range(8)), REPLICAS, 0.0)
        state.apply(RoutingDocument.model_validate({"version": version, "router": router}))
        assert sum(state.history.num_blocks(one) for one in REPLICAS) == num_blocks
        state.check_integrity(0.0)


@pytest.mark.parametrize("name", sorted(HISTORY_RULES))
def test_prompt_of_unknown_length_matches_nothing_and_leaves_no_trace(name: str) -> None:
    state = state_of(name)
    home = state.decide(request("0", *range(8)), REPLICAS, 0.0).replica_id
    unknown = state.decide(RouteRequest("1", 0, keys(*range(8))), REPLICAS, 0.0)
    assert unknown.replica_id != home
    state.block_size_tokens = None
    assert state.decide(request("2", *range(90, 98)), REPLICAS, 0.0).prompt_tokens == 128
    assert sum(state.history.num_blocks(one) for one in REPLICAS) == 8


def random_requests(rng: random.Random, count: int) -> list[RouteRequest]:
    """Prompts of 2 to 40 blocks out of three trees, so that prefixes branch at many depths; a key names its prefix."""
    names: dict[tuple[int, ...], int] = {}
    made = []
    for i in range(count):
        path = [rng.randrange(3)]
        while len(path) < 2 or (rng.random() < 0.9 and len(path) < 40):
            path.append(rng.randrange(2 if len(path) < 6 else 9))
        blocks = [names.setdefault(tuple(path[:depth]), len(names)) for depth in range(1, len(path) + 1)]
        made.append(request(f"{i}", *blocks))
    return made


def shared_blocks(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return shared


@pytest.mark.parametrize(("name", "threshold"), CACHE_AWARE.items())
@pytest.mark.parametrize("seed", range(3))
def test_cache_aware_state_agrees_with_a_reference_that_keeps_every_prompt(
    name: str, threshold: float, seed: int
) -> None:
    rng, state = random.Random(seed), state_of(name)
    routed: dict[str, list[tuple[bytes, ...]]] = {one: [] for one in REPLICAS}
    open_ids: dict[str, list[str]] = {one: [] for one in REPLICAS}
    branches = Counter[str]()
    for one in random_requests(rng, 400):
        hashes = one.block_hashes
        match = {w: max((shared_blocks(hashes, seen) for seen in routed[w]), default=0) for w in REPLICAS}
        size = {w: len({seen[:i] for seen in routed[w] for i in range(1, len(seen) + 1)}) for w in REPLICAS}
        load = {w: len(open_ids[w]) for w in REPLICAS}
        if max(load.values()) - min(load.values()) > 32:
            branch, allowed = "uneven", {w for w in REPLICAS if load[w] == min(load.values())}
        elif max(match.values()) / len(hashes) > threshold:
            branch, allowed = "match", {w for w in REPLICAS if match[w] == max(match.values())}
        else:
            branch, allowed = "smallest", {w for w in REPLICAS if size[w] == min(size.values())}
        branches[branch] += 1
        pick = state.decide(one, REPLICAS, 0.0).replica_id
        assert pick in allowed, branch
        routed[pick].append(hashes)
        open_ids[pick].append(one.request_id)
        finishing = [w for w in REPLICAS[1:] if open_ids[w]]  # "a" hangs
        if finishing and rng.random() < 0.7:
            state.expire(open_ids[rng.choice(finishing)].pop(), 0.0)
    assert {w: state.history.num_blocks(w) for w in REPLICAS} == {
        w: len({seen[:i] for seen in routed[w] for i in range(1, len(seen) + 1)}) for w in REPLICAS
    }
    assert min(branches[branch] for branch in ("uneven", "match", "smallest")) > 10, branches
    state.check_integrity(0.0)


@pytest.mark.parametrize("seed", range(3))
def test_prefix_affinity_history_agrees_with_rays_own_tree(seed: int) -> None:
    rng, state, tree = random.Random(seed), state_of("prefix-affinity"), PrefixTree()
    tree.add_tenants(REPLICAS, 0.0)
    branches = Counter[str]()
    for time_s, one in enumerate(random_requests(rng, 400)):
        text = "".join(chr(int.from_bytes(key, "big") + 1) for key in one.block_hashes)  # one character a block
        matched_text, matched = tree.prefix_match(text, REPLICAS)
        follows = len(matched_text) / len(text) >= 0.1
        chosen = matched if follows else tree.get_smallest_tenants()
        branches["match" if follows else "smallest"] += 1
        least = min(state.ledger.num_open(replica_id) for replica_id in chosen)
        pick = state.decide(one, REPLICAS, 0.0).replica_id
        assert pick in chosen
        assert state.ledger.num_open(pick) == least + 1
        tree.insert(text, pick, float(time_s))
        assert tree.tenant_to_char_count == {w: state.history.num_blocks(w) for w in REPLICAS}
    assert branches["match"] > 100
    assert branches["smallest"] >= 3
