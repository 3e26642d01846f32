"""Each experiment's own scenarios and policies, as they were asked for, without running one."""

from itertools import product

import pytest

from serve_app.config import EnginePolicy
from serve_app.sim.experiments.routing import sweep_points
from serve_app.sim.workloads import FAMILIES
from tests.sim.test_experiments import ORDERINGS, ROUTERS, cases_of, policies_of, scenarios_of

INSIDES = (("fcfs", "lru"), (EnginePolicy().ordering, EnginePolicy().eviction))
"""Ordering and eviction: plain vLLM's, and ours."""


def test_dynamic_has_ten_traces_of_four_families_under_every_ordering() -> None:
    families = ("filing", "retrieval", "hit-heavy", "mixed")
    assert scenarios_of("dynamic") == [f"{family}-seed{seed}" for family in families for seed in range(10)]
    assert set(families) <= set(FAMILIES)
    assert {ordering for ordering, _, _ in policies_of(cases_of("dynamic"), "mixed-seed9")} == ORDERINGS


@pytest.mark.parametrize("name", ["dynamic", "scenarios", "flood", "weak-spot", "decode"])
def test_orderings_differ_in_nothing_else_and_peek_protects_what_waits(name: str) -> None:
    cases = cases_of(name)
    for scenario in scenarios_of(name):
        labels = policies_of(cases, scenario)
        assert {ordering for ordering, _, _ in labels} == ORDERINGS
        assert {tuple(rest) for ordering, *rest in labels if ordering != "peek"} == {("lru", "round-robin")}
        assert ("peek", "lru (protect_waiting)", "round-robin") in labels


def test_scenarios_are_eleven_of_three_loads_and_four_kinds() -> None:
    loads = ("0.7", "0.95", "1.2")
    expected = {f"{kind}-{load}" for kind, load in product(("sec", "mixed", "multihop", "agent"), loads)}
    assert set(scenarios_of("scenarios")) == expected - {"multihop-0.7"}


def test_floods_are_named_by_miss_size_rate_and_start() -> None:
    expected = product(("2k", "6k", "16k"), ("0.8", "1.2"), ("0", "half", "fourfifths"))
    assert scenarios_of("flood") == ["-".join(names) for names in expected]


def test_ablation_changes_one_thing_of_fairway_at_a_time() -> None:
    cases = cases_of("ablation")
    assert scenarios_of("ablation") == ["filing-seed0", "mixed-seed0", "2k-1.2-0", "6k-1.2-0", "16k-1.2-0"]
    here = [case.policies for case in cases if case.scenario.name == "6k-1.2-0"]
    published = [one for one in here if one.ordering == "fairway"]
    ours = [one for one in here if one.ordering == "fairway-carried"]
    assert all(len(policies.engine) <= 1 for policies in published)
    numbers = {"fast_weight", "patience_multiple"}
    assert {field for one in published for field in one.engine} == {*numbers, "patience_floor_s"}
    assert {field for one in ours for field in one.engine} == {*numbers, "long_prefill_share", "protect_waiting"}
    defaults = EnginePolicy()
    assert all(getattr(defaults, field) != value for one in [*published, *ours] for field, value in one.engine.items())
    lanes = {ordering for ordering, _, _ in policies_of(cases, "filing-seed0")} - ORDERINGS
    assert "fairway-absolute-wait" in lanes


@pytest.mark.parametrize("name", ["dynamic", "ablation", "decode"])
def test_six_targets_have_their_judges_in_every_dynamic_scenario(name: str) -> None:
    cases = cases_of(name)
    for scenario in scenarios_of(name):
        assert {"lpm", "fcfs", "fairway"} <= {ordering for ordering, _, _ in policies_of(cases, scenario)}


def test_long_prefill_is_held_to_five_shares_at_two_step_sizes_and_not_at_all() -> None:
    cases = cases_of("long-prefill")
    names = ["steps-512-shorts-32", "steps-512-shorts-128", "steps-2048-shorts-32", "steps-2048-shorts-128"]
    assert scenarios_of("long-prefill") == names
    shares = [case.policies.engine.get("long_prefill_share") for case in cases[: len(cases) // 4]]
    assert shares == [None, None, 0.25, 0.5, 0.75, 0.9, 1.0]
    built = cases[0].scenario.build()
    assert [(one.phase, len(one.prompt)) for one in built.arrivals[:2]] == [("long", 100_000), ("short", 32)]
    assert built.cluster.engine.max_step_tokens == 512


def test_decode_has_64_and_256_output_tokens() -> None:
    built = {case.scenario.name: case.scenario.build.args[-1] for case in cases_of("decode")}
    assert built == {"filing-out64-seed0": 64, "filing-out256-seed0": 256}


def test_evictions_are_compared_under_fcfs_on_one_replica() -> None:
    for name in ("evict-worst", "evict-mixed"):
        labels = {label for scenario in scenarios_of(name) for label in policies_of(cases_of(name), scenario)}
        assert labels == {("fcfs", name, "round-robin") for name in ("lru", "rlt", "adaptive")}
    shares = {tuple(case.scenario.build.args[1:3]) for case in cases_of("evict-worst")}
    assert shares == set(product((0.5, 0.9), (0.5, 0.6, 0.8, 0.9, 0.98, 1.0)))


def test_protection_is_on_and_off_with_all_else_alike() -> None:
    labels = policies_of(cases_of("evict-protect"), "filing-seed0")
    evictions = ("lru", "lru (protect_waiting)", "rlt", "rlt (protect_waiting)")
    assert labels == list(product(("fcfs", "fairway"), evictions, ("round-robin",)))


def test_gsp_has_four_rates_with_plain_and_with_our_parts_inside() -> None:
    assert scenarios_of("gsp") == [f"gsp-{rate}-seed{seed}" for rate in (8, 12, 14, 16) for seed in range(5)]
    for case in cases_of("gsp"):
        params, cluster, seed = case.scenario.build.args
        assert (params.num_groups, params.prompts_per_group, params.output_tokens) == (128, 32, 4)
        assert params.prompt_tokens == (512, 1_024, 2_048, 4_096, 8_192)
        assert params.ideal_hit_rate == pytest.approx(0.484, abs=5e-4)
        assert case.scenario.name == f"gsp-{params.rate_per_s:g}-seed{seed}"
        assert cluster.num_replicas == 4
    combinations = set(policies_of(cases_of("gsp"), "gsp-12-seed0"))
    rivals = ROUTERS - {"least-work", "power-of-two"}
    assert {(*inside, router) for inside in INSIDES for router in rivals} <= combinations


@pytest.mark.parametrize("name", ["chat", "longdoc", "trace"])
def test_every_router_is_run_on_every_other_workload(name: str) -> None:
    for scenario in scenarios_of(name):
        labels = policies_of(cases_of(name), scenario)
        assert {(*inside, router) for inside in INSIDES for router in ROUTERS} <= set(labels)


def test_joint_has_each_decision_alone_each_pair_and_all_three() -> None:
    cases = cases_of("joint")
    workloads = ["gsp-8", "gsp-12", "gsp-14", "chat-calm", "chat-busy", "longdoc-calm", "longdoc-busy"]
    assert scenarios_of("joint") == [*workloads, "conversation", "synthetic"]
    for scenario in scenarios_of("joint"):
        labels = policies_of(cases, scenario)
        orderings, evictions = zip(*INSIDES, strict=True)
        assert set(product(orderings, evictions, ("round-robin", "lbgr"))) <= set(labels)


def test_defaults_are_compared_with_the_published_parts_and_with_none() -> None:
    assert scenarios_of("defaults") == scenarios_of("joint")
    plain = EnginePolicy()
    assert policies_of(cases_of("defaults"), "gsp-12") == [
        ("fcfs", "lru", "round-robin"),
        ("fcfs", "lru", "cache-aware-0.4"),
        ("fairway", "rlt", "lbgr"),
        (plain.ordering, plain.eviction, "lbgr"),
    ]


def test_sweep_changes_one_thing_of_its_base_at_a_time() -> None:
    points = sweep_points()
    base = next(point for point in points if point.name == "replicas-4")
    assert (base.params.rate_per_s, base.cluster.num_replicas) == (12.0, 4)
    for point in points:
        kind = point.name.split("-")[0]
        if kind == "replicas":  # as many requests a replica
            assert point.params.rate_per_s == 3.0 * point.cluster.num_replicas
        else:
            assert (point.params == base.params) != (point.cluster == base.cluster), point.name
    assert len({point.name for point in points}) == len(points)
    swept = {name.rsplit("-", 1)[0] for name in scenarios_of("sweep")}
    assert swept >= {"replicas", "rate", "cache", "output", "shared", "order", "kv-event-delay", "kv-event-loss"}


def test_faults_compare_every_router_where_learned_routing_may_fail() -> None:
    cases = cases_of("faults")
    assert scenarios_of("faults") == ["two-replicas", "no-shared-prefix", "no-fault", "restart", "slow"]
    clusters = {case.scenario.name: case.scenario.build.args[1] for case in cases}
    assert clusters["two-replicas"].num_replicas == 2
    assert clusters["no-fault"].faults == ()
    assert [fault.kind for fault in clusters["restart"].faults] == ["restart"]
    assert [(fault.kind, fault.factor) for fault in clusters["slow"].faults] == [("slow", 2.0)]
    alone = next(case.scenario.build.args[0] for case in cases if case.scenario.name == "no-shared-prefix")
    assert (alone.turns, alone.system_tokens) == ((1, 1), 0)
    assert {router for _, _, router in policies_of(cases, "slow")} >= ROUTERS
