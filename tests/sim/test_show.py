"""Results on a terminal: rows or a summary, how many targets were met, and what is approximate."""

from io import StringIO

import pytest

from serve_app.sim.metrics import Row
from serve_app.sim.report import Results, Target
from serve_app.sim.show import show_results
from serve_app.sim.tables import MAX_TARGETS


def row(scenario: str, ordering: str, p50_s: float, phase: str = "all") -> Row:
    names = {"scenario": scenario, "phase": phase, "ordering": ordering, "eviction": "lru", "router": "round-robin"}
    return {**names, "requests": 7, "ttft_p50_s": p50_s, "ttft_p99_s": 9.0, "ttft_max_s": 9.5, "starved": 0}


def targets_of(met: int, missed: int) -> list[Target]:
    good = [Target.at_most(f"filing-seed{n}/fairway/spike/p50", 1.0, 2.0) for n in range(met)]
    return good + [Target.at_most(f"filing-seed{n}/lpm/spike/p99", 3.0, 2.0) for n in range(missed)]


def shown(rows: list[Row], targets: list[Target] | None = None, approximations: tuple[str, ...] = ()) -> str:
    out = StringIO()
    show_results(Results("dynamic", 0, {}, {}, rows, targets or [], approximations), out)
    return out.getvalue()


def test_rows_of_single_scenarios_are_shown_as_they_are() -> None:
    text = shown([row("gsp-8", "fcfs", 1.5), row("gsp-12", "fcfs", 2.5)])
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines[:3]] == ["scenario", "gsp-8", "gsp-12"]
    assert "1.50" in lines[1]
    assert "targets met" not in text


def test_traces_of_a_family_are_shown_as_one_row_with_their_median_and_targets() -> None:
    p50s = {0: 1.0, 1: 5.0, 2: 2.0}
    rows = [row(f"filing-seed{seed}", "fairway", p50_s, "spike") for seed, p50_s in p50s.items()]
    text = shown(rows, targets_of(3, 0))
    assert "seed" not in text.splitlines()[1]
    assert "2.00" in text.splitlines()[1]
    assert "targets met: 3 of 3" in text


@pytest.mark.parametrize(
    ("met", "missed", "listed"),
    [
        (2, 1, 3),
        (0, MAX_TARGETS, MAX_TARGETS),
        (MAX_TARGETS, 3, 3),
        (MAX_TARGETS, MAX_TARGETS + 1, 0),
        (MAX_TARGETS + 1, 0, 0),
    ],
    ids=["few are all listed", "few missed", "of many the missed", "too many missed", "of many all met"],
)
def test_targets_are_listed_as_long_as_they_are_few(met: int, missed: int, listed: int) -> None:
    text = shown([row("gsp-8", "fcfs", 1.0)], targets_of(met, missed))
    assert f"targets met: {met} of {met + missed}" in text
    lines = [line for line in text.splitlines() if line.startswith("filing-seed")]
    assert len(lines) == listed
    assert sum(line.split()[-1] == "no" for line in lines) == (missed if listed else 0)
    assert ("bound" in text) == (listed > 0)


def test_every_approximation_is_said_on_a_line_of_its_own_however_long() -> None:
    texts = ("TTFT leaves out HTTP (all numbers).", "Long " * 60 + "(hit rates).")
    text = shown([row("gsp-8", "fcfs", 1.0)], approximations=texts)
    assert text.splitlines()[-2:] == [f"approximation: {one}" for one in texts]


def test_results_go_to_the_terminal_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    show_results(Results("gsp", 0, {}, {}, [row("gsp-8", "fcfs", 1.0)], targets_of(1, 0), ("Short.",)))
    assert capsys.readouterr().out == shown([row("gsp-8", "fcfs", 1.0)], targets_of(1, 0), ("Short.",))
