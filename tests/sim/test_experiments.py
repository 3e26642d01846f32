"""The experiments: which scenarios under which policies, without running one."""

import os
import re
from collections.abc import Callable
from itertools import groupby, product
from pathlib import Path
from typing import get_args

import pytest

from serve_app.config import EnginePolicy, PrefillTable, RoutingDocument
from serve_app.emulation.step_time import prefill_table
from serve_app.sim.catalogue import DESCRIPTIONS
from serve_app.sim.chosen import BASELINE, Policies
from serve_app.sim.experiments import EXPERIMENTS, Options
from serve_app.sim.experiments.base import RECORDED_PARTS, each, suffix
from serve_app.sim.experiments.eviction import mixed_targets, worst_targets
from serve_app.sim.experiments.ordering import best_that_does_not_starve, six_targets, worst_miss
from serve_app.sim.experiments.routing import PUBLISHED_INSIDE
from serve_app.sim.experiments.routing_targets import all_over_pairs, default_over_all, parity
from serve_app.sim.grid import Case
from serve_app.sim.report import Target
from serve_app.sim.step_time import DEVICES
from serve_app.sim.traces import DATA_VARIABLE, data_dir
from serve_app.sim.workloads import FAMILIES

DATA = data_dir(os.environ)
needs_data = pytest.mark.skipif(DATA is None, reason=f"the recorded data is absent; {DATA_VARIABLE} names its folder")
SOMEWHERE = Path("/somewhere")
"""For experiments that only write down where the data lies."""
ORDERINGS = {
    "fcfs",
    "lpm",
    "k-lpm-4",
    "k-lpm-8",
    "ragcache",
    "preble",
    "peek",
    "absolute-wait",
    "relative-wait",
    "fairway",
    "fairway-carried",
}
ROUTERS = {
    "round-robin",
    "least-work",
    "power-of-two",
    "cache-aware-0.3",
    "cache-aware-0.4",
    "cache-aware-0.5",
    "prefix-affinity",
    "lmetric",
    "lbgr-published",
    "lbgr",
}
QUEUE = ("dynamic", "scenarios", "flood", "ablation", "long-prefill", "weak-spot", "decode")
EVICTION = ("evict-worst", "evict-mixed", "evict-protect")
ROUTING = ("gsp", "chat", "longdoc", "trace", "sweep", "joint", "defaults", "faults")
TABLE: PrefillTable = prefill_table(DEVICES["l40"], 2_048, 4_096)

each_experiment = pytest.mark.parametrize("name", EXPERIMENTS)


def cases_of(name: str, options: Options | None = None) -> list[Case]:
    return EXPERIMENTS[name].cases(options or Options(data=None if name == "scenarios" else SOMEWHERE))


def scenarios_of(name: str, options: Options | None = None) -> list[str]:
    return list(dict.fromkeys(case.scenario.name for case in cases_of(name, options)))


def policies_of(cases: list[Case], scenario: str) -> list[tuple[str, str, str]]:
    """Ordering, eviction and router of each case of a scenario, as its rows will name them."""
    labels = [case.policies.labels() for case in cases if case.scenario.name == scenario]
    return [(one["ordering"], one["eviction"], one["router"]) for one in labels]


def test_experiments_are_those_that_were_asked_for() -> None:
    assert tuple(EXPERIMENTS) == (*QUEUE, *EVICTION, *ROUTING) == tuple(DESCRIPTIONS)
    assert {name: one.description for name, one in EXPERIMENTS.items()} == dict(DESCRIPTIONS)


@each_experiment
def test_an_experiment_names_its_device_and_approximations(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert any(device in str(experiment.parameters["device"]) for device in DEVICES)
    assert "derived" in str(experiment.parameters["device"])
    assert len(experiment.approximations) >= 3
    assert experiment.description.endswith((".", "?"))


@each_experiment
@pytest.mark.parametrize("options", [Options(), Options(seed=7, traces=2)], ids=["designed", "two traces"])
def test_no_row_can_be_taken_for_another(name: str, options: Options) -> None:
    cases = EXPERIMENTS[name].cases(Options(options.seed, options.traces, None if name == "scenarios" else SOMEWHERE))
    rows = [(case.scenario.name, *policies_of([case], case.scenario.name)[0]) for case in cases]
    assert len(set(rows)) == len(rows)
    # One name, one workload: the runs of a scenario can be compared.
    built = {(case.scenario.name, case.scenario.key()) for case in cases}
    assert len({name for name, _ in built}) == len(built)


@each_experiment
def test_cases_come_sorted_by_scenario_and_each_has_the_same_policies_throughout(name: str) -> None:
    cases = cases_of(name)
    groups = [scenario for scenario, _ in groupby(case.scenario.name for case in cases)]
    assert len(set(groups)) == len(groups)
    if name != "sweep":  # whose weights are swept on scenarios of their own
        assert len({tuple(policies_of(cases, scenario)) for scenario in groups}) == 1


@each_experiment
def test_all_policies_are_known_to_engine_and_router(name: str) -> None:
    for policies in {repr(case.policies): case.policies for case in cases_of(name)}.values():
        assert policies.engine_policy(0, TABLE).ordering == policies.ordering
        assert policies.router_settings(0).routing.router == policies.router


@each_experiment
def test_seed_and_traces_say_which_traces_are_run(name: str) -> None:
    def seeds(options: Options) -> set[int]:
        return {case.scenario.seed for case in EXPERIMENTS[name].cases(options)}

    data = None if name == "scenarios" else SOMEWHERE
    designed = {"dynamic": 10, "evict-worst": 5, "evict-mixed": 5, "evict-protect": 3, "gsp": 5}.get(name, 1)
    assert seeds(Options(data=data)) == set(range(designed))
    assert seeds(Options(seed=40, data=data)) == set(range(40, 40 + designed))
    assert seeds(Options(seed=40, traces=2, data=data)) == {40, 41}
    one = scenarios_of(name, Options(seed=40, traces=1, data=data))
    two = scenarios_of(name, Options(seed=40, traces=2, data=data))
    assert len(two) == 2 * len(one)
    if name not in ("dynamic", "decode", "evict-worst", "evict-mixed", "evict-protect", "ablation", "gsp"):
        assert not any(scenario.endswith("-seed40") for scenario in one)
    assert all(re.search(r"-seed4[01]$", scenario) for scenario in two)


@pytest.mark.parametrize(
    ("arguments", "says"), [({"seed": -1}, "seed is -1; it must be at least 0"), ({"traces": 0}, "traces is 0")]
)
def test_options_below_their_bounds_are_refused(arguments: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Options(**arguments)  # type: ignore[arg-type]  # only numbers here


def test_a_single_trace_keeps_the_plain_name() -> None:
    assert [suffix(Options(traces=traces), 3) for traces in (None, 1, 2)] == ["", "", "-seed3"]


def test_each_pairs_every_scenario_with_every_policy() -> None:
    scenarios = list(dict.fromkeys(case.scenario for case in cases_of("gsp")))
    policies = [BASELINE, Policies()]
    assert each(scenarios, policies) == [Case(*pair) for pair in product(scenarios, policies)]


@pytest.mark.parametrize("name", ROUTING)
def test_defaults_are_run_once_in_every_scenario_of_several_replicas(name: str) -> None:
    cases = cases_of(name)
    for scenario in scenarios_of(name):
        policies = [one.policies for one in cases if one.scenario.name == scenario]
        assert policies.count(Policies()) == (name != "sweep")
        assert policies.count(PUBLISHED_INSIDE) == (name in ("sweep", "defaults"))


def test_every_policy_that_the_settings_know_is_run_somewhere() -> None:
    run = [case.policies for name in ("gsp", "chat", "dynamic", "ablation", "evict-worst") for case in cases_of(name)]
    orderings = get_args(EnginePolicy.model_fields["ordering"].annotation)
    routers = get_args(RoutingDocument.model_fields["router"].annotation)
    evictions = get_args(EnginePolicy.model_fields["eviction"].annotation)
    assert {one.ordering for one in run} == set(orderings)
    assert {one.router for one in run} == set(routers)
    assert {one.eviction for one in run} == set(evictions)


@pytest.mark.parametrize(
    ("name", "needing"),
    [
        ("trace", ["conversation", "synthetic"]),
        ("joint", ["conversation", "synthetic"]),
        ("evict-mixed", ["conversation-0.3", "conversation-0.7", "coding-agents-0.3"]),
    ],
)
def test_without_the_data_the_scenarios_that_need_it_are_left_out(name: str, needing: list[str]) -> None:
    without, with_data = (scenarios_of(name, Options(traces=1, data=data)) for data in (None, SOMEWHERE))
    left_out = [re.sub(r"-seed\d+$", "", scenario) for scenario in with_data if scenario not in without]
    assert left_out == needing
    assert [scenario for scenario in with_data if scenario in without] == without


@needs_data
def test_with_the_data_filings_and_questions_have_the_lengths_of_real_texts() -> None:
    assert DATA is not None
    builds = {case.scenario.name: case.scenario.build.args[0] for case in cases_of("scenarios", Options(data=DATA))}
    assert len(builds) == 11
    assert builds["sec-0.7"].pages_tokens
    assert builds["multihop-1.2"].passages_tokens
    assert builds["mixed-0.7"] == FAMILIES["mixed"]


@pytest.mark.parametrize("seed", [0, 1, 5, 6, 13])
def test_every_seed_has_a_part_of_the_recorded_traces(seed: int) -> None:
    timed = cases_of("trace", Options(seed, 1, SOMEWHERE))
    starts_s = {case.scenario.name: case.scenario.build.args[1].start_s for case in timed}
    assert starts_s == {name: 600.0 * (seed % parts) for name, parts in RECORDED_PARTS.items()}
    mixed = cases_of("evict-mixed", Options(seed, 1, SOMEWHERE))
    parts = {case.scenario.build.args[2] for case in mixed if case.scenario.name.startswith("conversation")}
    assert parts == {seed % RECORDED_PARTS["conversation"]}


@needs_data
def test_recorded_parts_have_enough_requests() -> None:
    options = Options(seed=min(RECORDED_PARTS.values()) - 1, traces=1, data=DATA)
    for scenario in dict.fromkeys(case.scenario for case in cases_of("trace", options)):
        assert len(scenario.build().arrivals) == 1_200


@pytest.mark.parametrize(
    ("name", "judge"),
    [
        *((name, six_targets) for name in ("dynamic", "ablation", "decode")),
        ("scenarios", best_that_does_not_starve),
        ("flood", worst_miss),
        ("evict-worst", worst_targets),
        ("evict-mixed", mixed_targets),
        *((name, default_over_all) for name in ("gsp", "chat", "longdoc", "trace")),
        ("joint", all_over_pairs),
        ("faults", parity),
    ],
)
def test_experiments_are_judged_by_their_targets(name: str, judge: Callable[..., list[Target]]) -> None:
    assert EXPERIMENTS[name].targets is judge


@pytest.mark.parametrize("name", ["long-prefill", "weak-spot", "evict-protect", "sweep", "defaults"])
def test_experiments_that_only_show_ask_nothing(name: str) -> None:
    assert EXPERIMENTS[name].targets([{"scenario": "any", "ordering": "fcfs", "phase": "all", "ttft_p50_s": 1.0}]) == []
