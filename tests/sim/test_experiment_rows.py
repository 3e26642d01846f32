"""From finished runs to results: one row a case and phase, starvation by FCFS's measure, and what was run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from serve_app.sim.chosen import BASELINE, Policies
from serve_app.sim.columns import Columns, Served, columns
from serve_app.sim.experiment import cases_of, rows_of, run_experiment
from serve_app.sim.experiments import EXPERIMENTS, Experiment, Options
from serve_app.sim.experiments.ordering import ordered
from serve_app.sim.grid import Case, Outcome, Scenario
from serve_app.sim.metrics import Row
from serve_app.sim.report import Target
from tests.sim.small_cases import build_small, small_scenario

SMALL = partial(build_small)
FAIR, FIRST = ordered("fairway"), ordered("fcfs")


def served(ttfts_s: Sequence[float], phases: Sequence[str] = ("all",), gap_s: float = 1.0) -> Columns:
    """Requests `gap_s` apart of the phases in turn, each finished half a second after its first token."""
    requests = [
        Served(str(number), "replica-0", phases[number % len(phases)], gap_s * number, ttft_s, ttft_s + 0.5, 100, 40)
        for number, ttft_s in enumerate(ttfts_s)
    ]
    return columns(requests, ["replica-0", "replica-1"])


def outcome(policies: Policies, table: Columns, scenario: str = "one") -> Outcome:
    return Outcome(Case(Scenario(scenario, SMALL, 0), policies), table, cpu_s=1.25, was_read=False)


def starved_of(rows: Sequence[Row]) -> dict[str, int | None]:
    return {row["ordering"]: row["starved"] for row in rows}


def test_row_has_all_that_a_result_must_have() -> None:
    (row,) = rows_of([outcome(Policies(), served([1.0, 2.0, 3.0]))])
    promised = {f"{time}_{p}_s" for time in ("ttft", "latency") for p in ("p50", "p95", "p99")}
    promised |= {"ordering", "eviction", "router", "scenario", "phase", "requests", "ttft_max_s", "hit_rate"}
    assert promised | {"load_max_over_mean", "starved"} <= row.keys()
    assert row["default"] is True
    assert (row["scenario"], row["phase"], row["requests"], row["hit_rate"]) == ("one", "all", 3, 0.4)
    assert (row["ttft_p50_s"], row["ttft_max_s"], row["latency_p50_s"]) == (2.0, 3.0, 2.5)
    # All of the load on one of two replicas.
    assert row["load_max_over_mean"] == 2.0


def test_default_marks_the_product_in_what_is_compared() -> None:
    fair = replace(Policies(), router="round-robin", eviction="lru")
    outcomes = [outcome(one, served([1.0, 2.0])) for one in (replace(fair, ordering="fcfs"), fair, Policies())]
    assert ["default" in row for row in rows_of(outcomes)] == [False, False, True]
    assert ["default" in row for row in rows_of(outcomes, ("ordering",))] == [False, True, True]
    assert ["default" in row for row in rows_of(outcomes, ("eviction",))] == [False, False, True]


def test_rows_come_by_case_then_phase_and_only_the_last_says_what_was_completed_a_second() -> None:
    rows = rows_of([outcome(one, served([1.0, 2.0, 3.0, 4.0], ("calm", "spike"))) for one in (FIRST, FAIR)])
    assert [(row["ordering"], row["phase"]) for row in rows] == [
        (ordering, phase) for ordering in ("fcfs", "fairway") for phase in ("calm", "spike", "all")
    ]
    assert ["completed_per_s" in row for row in rows] == [False, False, True] * 2
    # Four requests from the first arrival at 0 s to the last answer at 3 + 4.5 s.
    assert rows[2]["completed_per_s"] == pytest.approx(4 / 7.5)


def test_completed_a_second_counts_from_the_first_arrival() -> None:
    late = served([1.0, 1.0])
    (row,) = rows_of([outcome(FIRST, replace(late, arrival_s=late.arrival_s + 100.0))])
    assert row["completed_per_s"] == pytest.approx(2 / 2.5)


def test_starvation_is_measured_by_fcfs_on_the_same_scenario_and_phase() -> None:
    # FCFS's p99 of ten equal times is that time: above 3 s a calm request starves, above 30 s one of the spike.
    slow, fast = served([1.0, 10.0] * 10, ("calm", "spike")), served([0.1] * 20, ("calm", "spike"))
    ours = served([3.5, 10.0, 2.5, 31.0] * 5, ("calm", "spike"))
    rows = rows_of([outcome(FAIR, ours), outcome(FIRST, slow), outcome(FIRST, fast, "two"), outcome(FAIR, fast, "two")])
    found = {(row["scenario"], row["ordering"], row["phase"]): row["starved"] for row in rows}
    assert [found["one", "fairway", phase] for phase in ("calm", "spike", "all")] == [5, 5, 5]
    assert [found["one", "fcfs", phase] for phase in ("calm", "spike", "all")] == [0, 0, 0]
    assert [found["two", "fairway", phase] for phase in ("calm", "spike", "all")] == [0, 0, 0]


def test_nothing_is_said_of_starvation_where_fcfs_was_not_run_with_this_eviction_and_router() -> None:
    table = served([1.0, 2.0])
    fcfs = [BASELINE, Policies("lbgr", "fcfs", "lru"), Policies("round-robin", "fcfs", "rlt")]
    rows = rows_of([outcome(one, table) for one in (*fcfs, Policies())])
    assert [row["starved"] for row in rows] == [0, 0, 0, None]
    assert rows_of([outcome(BASELINE, table, "one"), outcome(FAIR, table, "two")])[1]["starved"] is None


def test_fcfs_with_the_same_eviction_and_router_is_the_judge_and_no_other() -> None:
    judge, ours = served([1.0] * 10), served([4.0] * 10)
    others = [Policies("lbgr", "fcfs", "lru"), Policies("round-robin", "fcfs", "rlt")]
    rows = rows_of([*(outcome(one, served([99.0] * 10)) for one in others), outcome(FIRST, judge), outcome(FAIR, ours)])
    assert rows[-1]["starved"] == 10


@pytest.mark.parametrize(
    "changed",
    [
        ordered("peek", protect_waiting=True),
        Policies("round-robin", "fairway", "lru", {"fast_weight": 8}),
        Policies("round-robin", "fairway", "lru", weights={"affinity": 4.0}),
    ],
    ids=["protecting", "another weight", "another price"],
)
def test_policy_with_options_is_judged_by_fcfs_without_them(changed: Policies) -> None:
    rows = rows_of([outcome(FIRST, served([1.0] * 10)), outcome(changed, served([4.0] * 10))])
    assert [row["starved"] for row in rows] == [0, 10]


def test_fcfs_with_the_same_option_judges_before_fcfs_without_it() -> None:
    protecting = [ordered(name, protect_waiting=True) for name in ("fcfs", "fairway")]
    tables = [served([2.0] * 10), served([4.0] * 10)]
    outcomes = [outcome(one, table) for one, table in zip(protecting, tables, strict=True)]
    rows = rows_of([outcome(FIRST, served([1.0] * 10)), *outcomes])
    assert starved_of(rows) == {"fcfs": 0, "fairway": 0}


def small(options: Options) -> list[Case]:
    return [Case(small_scenario(f"small-seed{seed}", seed), one) for seed in options.seeds(2) for one in (FIRST, FAIR)]


def faster(rows: Sequence[Row]) -> list[Target]:
    return [Target.at_most(f"{row['scenario']}/{row['ordering']}/p50", row["ttft_p50_s"], 1e9) for row in rows]


@pytest.fixture
def gsp_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment("gsp", "Small.", small, faster, ("All of it.",), {"device": "tiny"})
    monkeypatch.setattr("serve_app.sim.experiment.EXPERIMENTS", {**EXPERIMENTS, "gsp": experiment})


@pytest.mark.usefixtures("gsp_is_small")
def test_results_say_what_was_run_and_are_judged() -> None:
    told: list[tuple[int, int]] = []
    results, runs = run_experiment("gsp", Options(seed=3), progress=lambda done, total: told.append((done, total)))
    names = [(row["scenario"], row["ordering"]) for row in results.rows]
    assert names == [(f"small-seed{seed}", ordering) for seed in (3, 4) for ordering in ("fcfs", "fairway")]
    assert (results.experiment, results.seed, results.approximations) == ("gsp", 3, ("All of it.",))
    assert results.targets == faster(results.rows)
    assert results.elapsed_s is not None
    assert results.elapsed_s > 0
    cpu_s = results.parameters["cpu_s"]
    assert isinstance(cpu_s, float)
    assert cpu_s <= results.elapsed_s + 0.05  # it is rounded to tenths
    assert dict(results.parameters) == {
        "description": "Small.",
        "command": "fairway-serve simulate gsp --seed 3",
        "device": "tiny",
        "runs": 4,
        "requests": 4 * 24,
        "cpu_s": cpu_s,
    }
    assert list(runs) == ["small-seed3", "small-seed4"]
    assert list(runs["small-seed3"]) == ["fcfs", "fairway"]
    assert sum(len(table) for run in runs.values() for table in run.values()) == 4 * 24
    assert told[-1] == (4, 4)


@pytest.mark.usefixtures("gsp_is_small")
def test_command_of_a_part_runs_that_part() -> None:
    results, runs = run_experiment("gsp", Options(seed=1, traces=3), scenarios="*-seed2")
    assert results.parameters["command"] == 'fairway-serve simulate gsp --seed 1 --traces 3 --scenario "*-seed2"'
    assert {row["scenario"] for row in results.rows} == set(runs) == {"small-seed2"}
    assert len(results.targets) == len(results.rows) == results.parameters["runs"] == 2


@pytest.mark.usefixtures("gsp_is_small")
def test_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    first, again, other = (run_experiment("gsp", Options(seed, 1))[0].rows for seed in (5, 5, 6))
    assert first == again
    assert [row["ttft_p50_s"] for row in first] != [row["ttft_p50_s"] for row in other]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: cases_of("gps", Options()), "EXPERIMENT is 'gps'; it must be one of dynamic, "),
        (
            lambda: cases_of("gsp", Options(), "gsp-9"),
            "--scenario is 'gsp-9'; it must match one of gsp-8-seed0, gsp-8-seed1",
        ),
        (lambda: cases_of("trace", Options()), "its scenarios need the recorded data"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_can(ask: Callable[[], list[Case]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ask()


def test_pattern_chooses_scenarios_with_all_their_policies() -> None:
    chosen, all_cases = cases_of("flood", Options(), "6k-*-half"), cases_of("flood", Options())
    assert {case.scenario.name for case in chosen} == {"6k-0.8-half", "6k-1.2-half"}
    assert [case.policies for case in chosen] == [
        case.policies for case in all_cases if case.scenario.name in ("6k-0.8-half", "6k-1.2-half")
    ]
