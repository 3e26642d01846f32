"""Decide, life-cycle events, live documents and snapshots of one ingress."""

import json
import random
from collections import Counter

import pytest

from serve_app.config import PrefillTable, RouterSettings, RoutingDocument, RoutingWeights
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.baselines import RULES
from serve_app.router.lifecycle import Closed, EngineReport, FirstToken, LifecycleBatch, LifecycleEvent, Opened
from serve_app.router.routing_state import (
    EXPECTED_FOR_S,
    UNKNOWN_PROMPT_TOKENS,
    Decision,
    RouteRequest,
    RoutingState,
)

BLOCK = 16
PROFILE = PrefillProfile(
    PrefillTable(
        device="test",
        model="test",
        dtype="test",
        vllm_version="test",
        date="2026-01-01",
        tokens=(1, 1_000),
        seconds=(0.011, 1.01),
        base_s=0.01,
        hit_s_per_token=1e-5,
    )
)
"""10 ms and 1 ms a token; 10 us a cached token."""
REPLICAS = ["a", "b", "c", "d"]


def state_of(router: str = "lbgr", weights: dict[str, float] | None = None, **settings: float) -> RoutingState:
    document = RoutingDocument.model_validate({"router": router, "weights": weights or {}})
    state = RoutingState(RouterSettings.model_validate({"routing": document, **settings}), PROFILE, BLOCK)
    state.set_replicas(REPLICAS)
    return state


def keys(*names: int) -> tuple[bytes, ...]:
    return tuple(name.to_bytes(8, "big") for name in names)


def closed(request_id: str, outcome: str = "finished", ttft_s: float | None = None, cached_tokens: int = 0) -> Closed:
    status = {"finished": 200, "aborted": 499, "rejected": 429, "failed": 500}[outcome]
    return Closed(request_id, status, outcome, 1.0, ttft_s, 100, cached_tokens, 4)  # type: ignore[arg-type]  # a literal


def batch(
    replica_id: str,
    seq: int,
    *events: LifecycleEvent,
    incarnation: str = "1",
    open_ids: set[str] | None = None,
    report: EngineReport | None = None,
) -> LifecycleBatch:
    opened = None if open_ids is None else frozenset(open_ids)
    return LifecycleBatch(replica_id, incarnation, seq, events, opened, report)


def loads(state: RoutingState, now_s: float) -> dict[str, float]:
    return {replica_id: state.ledger.load_s(replica_id, now_s) for replica_id in REPLICAS}


def test_decision_follows_the_formula_and_reserves_its_service() -> None:
    state = state_of(weights={"affinity": 2.0})
    state.index.stored("b", keys(1, 2, 3))
    state.index.stored("c", keys(1))
    decision = state.decide(RouteRequest("r", 100, keys(1, 2, 3, 4, 5, 6)), REPLICAS, now_s=5.0)
    assert (decision.replica_id, decision.hit_tokens, decision.prompt_tokens) == ("b", 48, 100)
    terms = {one.replica_id: one for one in decision.candidates}
    assert [one.total_s for one in decision.candidates] == sorted(one.total_s for one in decision.candidates)
    assert terms["b"].miss_s == pytest.approx(0.01 + 0.052)
    assert terms["b"].hit_s == pytest.approx(0.00048)
    assert terms["b"].affinity_s == 0.0
    assert terms["c"].affinity_s == pytest.approx(2.0 * 0.032)
    assert terms["a"].affinity_s == pytest.approx(2.0 * 0.048)
    assert terms["a"].miss_s == pytest.approx(0.01 + 0.1)
    assert decision.service_s == pytest.approx(0.06248)
    assert decision.predicted_s == pytest.approx(0.06248)
    assert loads(state, 5.0) == {"a": 0.0, "b": decision.service_s, "c": 0.0, "d": 0.0}
    assert (decision.router, decision.weights_version, decision.decided_at_s) == ("lbgr", 1, 5.0)


def test_last_token_and_its_block_are_always_computed() -> None:
    state = state_of()
    state.index.stored("a", keys(1, 2))
    assert state.decide(RouteRequest("r", 32, keys(1, 2)), ["a"], 0.0).hit_tokens == 16
    assert state.decide(RouteRequest("s", 33, keys(1, 2)), ["a"], 0.0).hit_tokens == 32
    assert state.decide(RouteRequest("t", 1, ()), ["a"], 0.0).hit_tokens == 0


def test_no_hits_are_counted_while_the_block_size_is_unknown() -> None:
    state = RoutingState(RouterSettings(), PROFILE, None)
    state.index.stored("a", keys(1, 2))
    assert state.decide(RouteRequest("r", 40, keys(1, 2)), ["a"], 0.0).hit_tokens == 0
    state.block_size_tokens = BLOCK
    assert state.decide(RouteRequest("s", 40, keys(1, 2)), ["a"], 0.0).hit_tokens == 32


def test_burst_of_equal_requests_spreads_at_once() -> None:
    for router in RULES:
        state = state_of(router)
        picks = Counter(
            state.decide(RouteRequest(f"{i}", 32_000, keys(i * 10_000)), REPLICAS, 0.0).replica_id for i in range(100)
        )
        assert max(picks.values()) <= 1.3 * 100 / len(REPLICAS), router
        state.check_integrity(0.0)


def test_prompt_of_unknown_length_is_routed_by_load_and_still_reserves() -> None:
    state = state_of()
    for replica_id in "abc":
        state.ledger.reserve(f"work on {replica_id}", replica_id, 1.0, 0.0)
    decision = state.decide(RouteRequest("r", 0, keys(1)), REPLICAS, 0.0)
    assert (decision.replica_id, decision.hit_tokens, decision.prompt_tokens) == ("d", 0, 0)
    assert decision.service_s == pytest.approx(PROFILE.prefill_s_one(UNKNOWN_PROMPT_TOKENS))
    picks = Counter(state.decide(RouteRequest(f"{i}", 0), ["x", "y"], 0.0).replica_id for i in range(100))
    assert max(picks.values()) <= 51


def test_batch_of_prompts_costs_each_of_them_and_teaches_nothing() -> None:
    state = state_of(residual_min_samples=1)
    decision = state.decide(RouteRequest("r", 400, (), num_prompts=4), REPLICAS, 0.0)
    assert decision.service_s == pytest.approx(4 * 0.11)
    state.on_batch(batch(decision.replica_id, 0, FirstToken("r", 2.0, 0, 400)), 1.0)
    assert state.estimator.state.samples == 0
    assert state.ledger.num_open(decision.replica_id) == 1


def test_request_decided_again_moves_its_reservation() -> None:
    state = state_of()
    first = state.decide(RouteRequest("r", 100), ["a"], 0.0)
    second = state.decide(RouteRequest("r", 100), ["b"], 0.0)
    assert (first.replica_id, second.replica_id) == ("a", "b")
    assert loads(state, 0.0) == {"a": 0.0, "b": second.service_s, "c": 0.0, "d": 0.0}
    record = state.decisions.get("r")
    assert record is not None
    assert record.decision is second


def test_decision_without_candidates_is_refused() -> None:
    with pytest.raises(ValueError, match="replica_ids must name at least one"):
        state_of().decide(RouteRequest("r", 1), [], 0.0)


def test_life_of_a_request_is_recorded_learned_and_released() -> None:
    state = state_of()
    decision = state.decide(RouteRequest("r", 100), REPLICAS, 0.0)
    home = decision.replica_id
    state.on_batch(batch(home, 0, Opened("r", 9.0)), 0.1)
    assert state.ledger.load_s(home, 0.0) == pytest.approx(decision.service_s)
    state.on_batch(batch(home, 1, FirstToken("r", 0.25, 16, 100)), 0.3)
    assert (state.ledger.load_s(home, 0.3), state.ledger.num_open(home)) == (0.0, 1)
    state.on_batch(batch(home, 2, closed("r", ttft_s=0.25, cached_tokens=16)), 1.0)
    assert state.ledger.num_open(home) == 0
    record = state.decisions.get("r")
    assert record is not None
    assert record.as_row()["observed"] == {"ttft_s": 0.25, "cached_tokens": 16, "e2e_s": 1.0, "status": 200}
    assert state.estimator.state.samples == 1
    assert state.estimator.state.mae_s == pytest.approx(0.25 - decision.predicted_s)
    totals = state.totals
    assert (totals.finished, totals.observed_prompt_tokens, totals.observed_cached_tokens) == (1, 100, 16)
    state.check_integrity(1.0)


def test_first_token_is_taken_from_the_closed_event_when_its_own_was_lost() -> None:
    state = state_of()
    home = state.decide(RouteRequest("r", 100), REPLICAS, 0.0).replica_id
    state.on_batch(batch(home, 0, closed("r", ttft_s=0.5)), 1.0)
    assert state.estimator.state.samples == 1


@pytest.mark.parametrize("outcome", ["aborted", "rejected", "failed"])
def test_request_that_ends_without_a_token_is_released_and_teaches_nothing(outcome: str) -> None:
    state = state_of()
    home = state.decide(RouteRequest("r", 100), REPLICAS, 0.0).replica_id
    state.on_batch(batch(home, 0, closed("r", outcome)), 1.0)
    state.on_batch(batch(home, 1, FirstToken("r", float("nan"), 0, 100)), 1.0)
    assert (state.ledger.num_open(home), state.estimator.state.samples) == (0, 0)
    assert getattr(state.totals, outcome) == 1


def test_request_of_another_ingress_counts_from_its_opened_event() -> None:
    state = state_of()
    state.on_batch(batch("a", 0, Opened("theirs", 2.0)), 0.0)
    assert state.ledger.load_s("a", 0.0) == 2.0
    assert state.decide(RouteRequest("r", 100), ["a", "b"], 0.0).replica_id == "b"
    state.on_batch(batch("a", 1, FirstToken("theirs", 1.0, 0, 9), closed("theirs", ttft_s=1.0)), 0.0)
    assert loads(state, 0.0)["a"] == 0.0
    assert state.estimator.state.samples == 0


def test_request_that_opens_elsewhere_takes_its_reservation_along() -> None:
    state = state_of()
    state.decide(RouteRequest("r", 100), ["a"], 0.0)
    state.on_batch(batch("b", 0, Opened("r", 0.5)), 0.0)
    assert loads(state, 0.0) == {"a": 0.0, "b": 0.5, "c": 0.0, "d": 0.0}
    assert state.totals.moved == 1


def test_repeated_and_late_batches_change_nothing_twice() -> None:
    state = state_of()
    state.on_batch(batch("a", 0), 0.0)
    state.on_batch(batch("a", 2, closed("r")), 0.0)
    state.on_batch(batch("a", 1, Opened("r", 1.0), open_ids={"r"}), 0.0)
    state.on_batch(batch("a", 2, closed("r")), 0.0)
    assert state.ledger.num_open("a") == 0
    totals = state.totals
    assert (totals.batches, totals.batches_lost, totals.batches_late) == (2, 1, 2)


def test_list_of_open_requests_heals_lost_events_both_ways() -> None:
    state = state_of(orphan_grace_s=5.0)
    state.decide(RouteRequest("lost closed", 100), ["a"], 0.0)
    state.decide(RouteRequest("on its way", 100), ["a"], 8.0)
    state.on_batch(batch("a", 0, open_ids={"lost opened"}), 10.0)
    assert state.ledger.open_ids("a") == {"on its way", "lost opened"}
    assert state.totals.orphans == 1


def test_restarted_replica_starts_empty_and_its_dead_incarnation_is_not_believed() -> None:
    state = state_of()
    state.on_batch(batch("a", 7, Opened("old", 1.0), incarnation="1"), 0.0)
    state.decide(RouteRequest("r", 100), ["a"], 0.0)
    state.on_batch(batch("a", 0, Opened("new", 0.5), incarnation="2"), 1.0)
    assert state.ledger.open_ids("a") == {"new"}
    assert state.totals.restarts == 1
    state.on_batch(batch("a", 8, Opened("ghost", 1.0), open_ids=set(), incarnation="1"), 30.0)
    assert state.ledger.open_ids("a") == {"new"}
    state.on_batch(batch("a", 1, closed("new"), incarnation="2"), 30.0)
    assert state.ledger.num_open("a") == 0
    assert state.totals.batches_lost == 0
    state.check_integrity(30.0)


def test_departed_replica_is_forgotten_at_once_and_late_news_of_it_only_recorded() -> None:
    state = state_of()
    state.index.stored("a", keys(1))
    state.on_batch(batch("a", 0), 0.0)
    state.decide(RouteRequest("r", 100, keys(1)), ["a"], 0.0)
    state.set_replicas("bcd")
    assert (state.ledger.num_open("a"), state.index.num_blocks("a")) == (0, 0)
    state.on_batch(batch("a", 1, Opened("s", 1.0), closed("r", ttft_s=0.5), open_ids={"s"}), 1.0)
    assert state.ledger.num_open("a") == 0
    record = state.decisions.get("r")
    assert record is not None
    assert record.observed.status == 200
    state.check_integrity(1.0)
    state.set_replicas(REPLICAS)
    assert state.decide(RouteRequest("t", 100, keys(1)), ["a"], 2.0).hit_tokens == 0


def test_reservation_that_nobody_reports_on_can_be_expired() -> None:
    state = state_of()
    home = state.decide(RouteRequest("r", 100), REPLICAS, 0.0).replica_id
    assert state.expire("r", 1.0)
    assert not state.expire("r", 1.0)
    assert state.ledger.load_s(home, 1.0) == 0.0


def test_only_a_newer_document_is_applied_and_from_then_on_whole() -> None:
    state = state_of()
    newer = RoutingDocument(version=2, router="round-robin", weights=RoutingWeights(miss=3.0, load_half_life_s=0.5))
    assert state.apply(newer)
    assert not state.apply(newer)
    assert not state.apply(RoutingDocument(version=1))
    assert state.ledger.half_life_s == 0.5
    decisions = [state.decide(RouteRequest(f"{i}", 100), REPLICAS, 0.0) for i in range(4)]
    assert {one.replica_id for one in decisions} == set(REPLICAS)
    assert {(one.router, one.weights_version) for one in decisions} == {("round-robin", 2)}
    assert decisions[0].candidates[0].miss_s == pytest.approx(0.33)
    assert decisions[0].predicted_s == pytest.approx(0.11)


def test_learner_corrects_predictions_once_it_is_warm() -> None:
    state = state_of(residual_min_samples=16)
    for i in range(100):
        home = state.decide(RouteRequest(f"{i}", 100), REPLICAS, float(i)).replica_id
        state.on_batch(batch(home, i, closed(f"{i}", ttft_s=0.41)), i + 0.5)
    decision = state.decide(RouteRequest("r", 100), REPLICAS, 100.0)
    assert decision.predicted_s == pytest.approx(0.41, abs=0.03)
    assert decision.candidates[0].residual_s == pytest.approx(0.0, abs=0.02)
    assert decision.service_s == pytest.approx(0.11)


def test_snapshot_tells_everything_and_is_ready_for_json() -> None:
    state = state_of()
    state.index.stored("a", keys(1, 2))
    for i in range(60):
        state.decide(RouteRequest(f"{i}", 100, keys(1, 2, 3)), REPLICAS, 0.0)
    snapshot = json.loads(json.dumps(state.snapshot(0.0)))
    assert snapshot["version"] == 1
    assert snapshot["router"] == "lbgr"
    assert snapshot["weights"]["affinity_load"] == 0.1
    rows = {row["replica_id"]: row for row in snapshot["replicas"]}
    assert list(rows) == REPLICAS
    assert rows["a"]["index_blocks"] == 2
    assert sum(row["num_open"] for row in rows.values()) == 60
    assert rows["a"]["load_s"] == state.ledger.load_s("a", 0.0)
    assert snapshot["totals"]["decisions"] == 60
    assert snapshot["totals"]["prompt_tokens"] == 6_000
    assert snapshot["residual"]["cold"] is True
    assert [row["request_id"] for row in snapshot["decisions"]] == [f"{i}" for i in range(59, 9, -1)]
    assert len(snapshot["decisions"][0]["candidates"]) == 4
    assert snapshot["decisions"][0]["observed"]["ttft_s"] is None


def test_prefix_of_a_request_on_its_way_is_credited_until_it_ends_without_a_token() -> None:
    state = state_of()
    home = state.decide(RouteRequest("r", 100, keys(1, 2, 3, 4, 5, 6)), REPLICAS, 0.0).replica_id
    second = state.decide(RouteRequest("s", 100, keys(1, 2, 3, 7, 8, 9)), REPLICAS, 0.0)
    assert {one.replica_id: one.hit_tokens for one in second.candidates} == {**dict.fromkeys(REPLICAS, 0), home: 48}
    state.on_batch(batch(home, 0, closed("r", "aborted")), 1.0)
    state.expire("s", 1.0)
    third = state.decide(RouteRequest("t", 100, keys(1, 2, 3)), REPLICAS, 1.0)
    assert all(one.hit_tokens == 0 for one in third.candidates)


def test_replica_whose_events_are_not_trusted_is_credited_with_what_was_routed_there() -> None:
    state = state_of()
    state.trust_events_of(lambda replica_id: replica_id != "a")
    state.decide(RouteRequest("r", 100, keys(1, 2, 3)), ["a"], 0.0)
    state.on_batch(batch("a", 0, closed("r", ttft_s=0.1)), 1.0)
    state.index.clear("a")  # its events stopped, and what was known is void
    decision = state.decide(RouteRequest("s", 100, keys(1, 2, 3)), REPLICAS, 2.0)
    assert (decision.replica_id, decision.hit_tokens) == ("a", 48)
    assert state.totals.stale_view == 2
    state.trust_events_of(lambda replica_id: True)
    state.index.clear("a")
    state.expire("s", 3.0)
    assert state.decide(RouteRequest("t", 100, keys(1, 2, 3)), ["a"], 3.0).hit_tokens == 0
    assert state.totals.stale_view == 2


def test_work_that_only_the_engine_knows_of_counts_until_its_report_is_old() -> None:
    state = state_of()
    state.on_batch(batch("a", 0, report=EngineReport(queued_tokens=4_000, running=1, waiting=4, at_s=0.0)), 0.0)
    terms = {one.replica_id: one.queue_s for one in state.decide(RouteRequest("r", 100), REPLICAS, 0.0).candidates}
    assert terms == {"a": pytest.approx(4 * 1.01), "b": 0.0, "c": 0.0, "d": 0.0}
    assert state.decide(RouteRequest("s", 100), ["a"], 60.0).candidates[0].queue_s == 0.0


def test_request_may_be_ranked_by_another_rule_than_the_document_s() -> None:
    state = state_of()
    picks = [state.decide(RouteRequest(f"{i}", 100), REPLICAS, 0.0, router="round-robin") for i in range(4)]
    assert [one.replica_id for one in picks] == REPLICAS
    assert {one.router for one in picks} == {"round-robin"}
    assert state.decide(RouteRequest("r", 100), REPLICAS, 0.0).router == "lbgr"


STEP_ODDS = {"ours": 8, "theirs": 4, "token": 6, "close": 10, "vanish": 1, "return": 2, "restart": 1}


class Cluster:
    """Engines' workers as they should behave, and a network that loses, repeats and reorders their batches."""

    def __init__(self, state: RoutingState, rng: random.Random) -> None:
        self.state, self.rng, self.now_s = state, rng, 0.0
        self.open: dict[str, dict[str, bool]] = {name: {} for name in REPLICAS}
        self.incarnation = dict.fromkeys(REPLICAS, 0)
        self.seq = dict.fromkeys(REPLICAS, 0)
        self.wire: list[LifecycleBatch] = []

    def report(self, name: str, *events: LifecycleEvent, whole: bool = False, lossy: bool = True) -> None:
        one = batch(
            name,
            self.seq[name],
            *events,
            incarnation=f"{name}{self.incarnation[name]}",
            open_ids=set(self.open[name]) if whole else None,
            report=EngineReport(100 * len(self.open[name]), 0, len(self.open[name]), 0.1),
        )
        self.seq[name] += 1
        if not lossy:
            self.state.on_batch(one, self.now_s)
            return
        self.wire += [one] * self.rng.choices([0, 1, 2], [1, 8, 1])[0]
        if self.rng.random() < 0.2:
            self.rng.shuffle(self.wire)

    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            self.state.on_batch(self.wire.pop(0), self.now_s)

    def restart(self, name: str) -> None:
        self.open[name] = {}
        self.incarnation[name] += 1
        self.seq[name] = 0

    def step(self, request_id: str) -> None:
        rng, alive = self.rng, sorted(self.open)
        self.now_s += rng.expovariate(2.0)
        match rng.choices(["ours", "theirs", "token", "close", "vanish", "return", "restart"], [8, 4, 6, 10, 1, 2, 1])[
            0
        ]:
            case "ours":
                name = self.state.decide(
                    RouteRequest(request_id, rng.randrange(500), keys(*range(rng.randrange(9)))), alive, self.now_s
                ).replica_id
                if rng.random() < 0.1:
                    name = rng.choice(alive)  # redispatched
                if rng.random() < 0.95:  # else it never gets there
                    self.open[name][request_id] = False
                    self.report(name, Opened(request_id, 0.1))
            case "theirs":
                self.open[name := rng.choice(alive)][request_id] = False
                self.report(name, Opened(request_id, 0.2), whole=rng.random() < 0.3)
            case "token" | "close" as what if busy := [name for name in alive if self.open[name]]:
                name = rng.choice(busy)
                request = rng.choice(sorted(self.open[name]))
                if what == "token":
                    self.report(name, FirstToken(request, 0.5, 0, 9))
                else:
                    del self.open[name][request]
                    self.report(name, closed(request, rng.choice(["finished", "aborted", "rejected", "failed"])))
            case "vanish" if len(alive) > 1:
                self.restart(name := rng.choice(alive))
                del self.open[name]
                self.state.set_replicas(sorted(self.open))
            case "return" if len(alive) < len(REPLICAS):
                self.open[rng.choice([name for name in REPLICAS if name not in alive])] = {}
                self.state.set_replicas(sorted(self.open))
            case "restart":
                self.restart(rng.choice(alive))


@pytest.mark.parametrize("seed", range(20))
def test_everything_is_released_exactly_once_whatever_the_network_does(seed: int) -> None:
    rng = random.Random(seed)
    state = state_of(rng.choice(list(RULES)), orphan_grace_s=5.0, decisions_kept=50)
    cluster = Cluster(state, rng)
    blind = set(rng.sample(REPLICAS, 2))
    state.trust_events_of(lambda replica_id: replica_id not in blind or rng.random() < 0.5)
    for step in range(600):
        cluster.step(f"{step}")
        cluster.deliver(rng.randrange(4))
        state.check_integrity(cluster.now_s)
    for name in sorted(cluster.open):
        for request_id in list(cluster.open[name]):
            del cluster.open[name][request_id]
            cluster.report(name, closed(request_id))
    cluster.deliver(len(cluster.wire))
    cluster.now_s += 5.0
    for name in sorted(cluster.open):
        cluster.report(name, whole=True, lossy=False)
    state.check_integrity(cluster.now_s)
    assert loads(state, cluster.now_s) == dict.fromkeys(REPLICAS, 0.0)
    assert [state.ledger.num_open(name) for name in REPLICAS] == [0, 0, 0, 0]
    assert state.ledger.num_reserved == state.ledger.num_released > 200
    totals = state.totals
    assert min(totals.batches_lost, totals.batches_late, totals.restarts, totals.moved, totals.orphans) > 0
    last = state.decide(
        RouteRequest("last", 16, keys(10_000)), sorted(cluster.open), cluster.now_s + 2 * EXPECTED_FOR_S
    )
    assert state.index.num_entries == state.index.num_expected == 1
    state.expire("last", last.decided_at_s)
    assert state.index.num_entries == 0


def test_same_seed_decides_the_same() -> None:
    def run() -> list[Decision]:
        state = state_of(seed=7)
        return [state.decide(RouteRequest(f"{i}", i * 7 % 300, keys(i % 5)), REPLICAS, i * 0.1) for i in range(200)]

    assert run() == run()
