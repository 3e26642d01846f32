"""Many runs: the same in one process and in two, resumable, and told apart by all that decides a result."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.sim import grid
from serve_app.sim.chosen import BASELINE, Policies
from serve_app.sim.columns import COLUMNS, Columns
from serve_app.sim.grid import Case, run_cases, source_fingerprint
from tests.sim.small_cases import GSP, small_scenario

CASES = [
    Case(small_scenario(name, seed, num_replicas=2), policies)
    for name, seed in (("one", 1), ("two", 2))
    for policies in (BASELINE, Policies())
]


def same(one: Columns, other: Columns) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)


def test_two_processes_give_what_one_gives_in_the_order_of_the_cases() -> None:
    told: list[tuple[int, int]] = []
    alone = run_cases(CASES, 1)
    together = run_cases(CASES, 2, progress=lambda done, total: told.append((done, total)))
    assert [outcome.case for outcome in together] == CASES
    assert all(same(one.columns, other.columns) for one, other in zip(alone, together, strict=True))
    assert not same(alone[0].columns, alone[1].columns)
    assert told == [(done, len(CASES)) for done in range(len(CASES) + 1)]


def test_finished_runs_are_read_back_and_not_run_again(tmp_path: Path) -> None:
    first = run_cases(CASES[:2], 1, tmp_path)
    again = run_cases(CASES, 1, tmp_path)
    assert all(same(one.columns, other.columns) for one, other in zip(first, again, strict=False))
    assert [outcome.was_read for outcome in again] == [True, True, False, False]
    assert all(outcome.cpu_s > 0 for outcome in again)


def test_another_source_another_scenario_or_other_policies_are_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[1]
    others = [
        replace(case, policies=Policies(weights={"affinity": 4.0})),
        replace(case, scenario=small_scenario("one", 1, num_replicas=2, params=replace(GSP, rate_per_s=7.0))),
        replace(case, scenario=replace(case.scenario, seed=9)),
    ]
    run_cases([case], 1, tmp_path)
    assert not any(outcome.was_read for outcome in run_cases(others, 1, tmp_path))
    monkeypatch.setattr(grid, "source_fingerprint", lambda: "changed")
    assert not run_cases([case], 1, tmp_path)[0].was_read


def test_fingerprint_follows_what_decides_a_run_and_not_what_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.py", "settings.py", "policies/a.py", "sim/run.py", "sim/plots.py", "sim/experiments/gsp.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(grid, "PACKAGE", tmp_path)
    before = source_fingerprint()
    (tmp_path / "sim/plots.py").write_text("prettier")
    (tmp_path / "sim/experiments/gsp.py").write_text("another sentence")
    assert source_fingerprint() == before
    for name in ("config.py", "policies/a.py", "sim/run.py"):
        (tmp_path / name).write_text("changed")
        changed = source_fingerprint()
        assert changed != before
        before = changed


def test_less_than_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="jobs is 0"):
        run_cases(CASES, 0)
