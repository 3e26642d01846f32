"""What a run of the emulated comparison comes to: figures on the emulated clock, files, and one line a router."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from router_emulated_cells import Cell, Scale, settings_of
from router_emulated_cpu import CpuMark, cpu_ticks, use_between
from router_emulated_load import Answer
from router_emulated_report import read_result, row_of, table, write_result

ANSWER = Answer(0.0, 0.001, 1.0, 2.0, 100, 25, 4, "a")
ONE = Scale(time_scale=1.0)


def test_times_are_on_the_emulated_clock_and_lateness_on_the_walls() -> None:
    row = row_of([ANSWER, replace(ANSWER, ttft_s=3.0, latency_s=4.0, late_s=0.001)], Scale(time_scale=2.0))

    assert (row["ttft_p50_s"], row["latency_p50_s"]) == (1.0, 1.5)
    assert row["late_p99_ms"] == pytest.approx(1.0)


def test_busiest_engine_is_compared_with_the_mean_of_all_four() -> None:
    answers = [replace(ANSWER, replica=name) for name in "aaab"]

    assert row_of(answers, ONE)["load_max_over_mean"] == 3.0


def test_errors_are_counted_and_enter_no_other_figure() -> None:
    failed = Answer(0.0, 0.001, error="status 500")

    row = row_of([ANSWER, failed, failed], ONE)

    assert (row["requests"], row["errors"], row["latency_p99_s"], row["hit_rate"]) == (3, 2, 2.0, 0.25)


def test_run_without_an_answer_has_counts_alone() -> None:
    assert set(row_of([Answer(0.0, 0.001, error="gone")], ONE)) == {"requests", "errors", "late_p99_ms"}


def test_kept_result_is_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    result, path = _result("lbgr", 0, 1.0), tmp_path / "results" / "cell.json"

    write_result(path, result)

    assert read_result(path) == json.loads(json.dumps(result))
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", '{"row": {}}'])
def test_file_of_something_else_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "cell.json").write_text(text)

    with pytest.raises(ValueError, match=r"cell\.json holds no cell's result"):
        read_result(tmp_path / "cell.json")


def test_table_has_one_line_a_router_with_the_mean_over_the_seeds() -> None:
    results = [_result("sglang-0.3", 0, 9.0), _result("lbgr", 1, 3.0, cpu_busy=0.8), _result("lbgr", 0, 1.0)]

    lbgr, sglang = table(results).splitlines()[2:]

    assert lbgr.startswith("| 20 | fresh | lbgr | 1 0 | 2.00 |") or lbgr.startswith(
        "| 20 | fresh | lbgr | 0 1 | 2.00 |"
    )
    assert lbgr.endswith("| 0.80 (!) |")
    assert sglang.startswith("| 20 | fresh | sglang-0.3 | 0 | 9.00 |")
    assert sglang.endswith("| 0.50 |")


def test_ticks_are_read_without_counting_guests_twice() -> None:
    assert cpu_ticks("cpu  10 1 9 70 5 2 2 1 10 0\ncpu0 1 2 3\n") == (100, 75)


def test_shares_are_of_all_cores_and_of_processes_that_were_there_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    begun, ended = CpuMark(0.0, 1_000, 500, {1: 5.0, 2: 1.0}), CpuMark(10.0, 3_000, 1_500, {1: 9.0, 3: 7.0})

    use = use_between(begun, ended)

    assert use.cpu_busy == 0.5
    assert use.cpu_own == pytest.approx(0.2)


def _result(router: str, seed: int, latency_s: float, cpu_busy: float = 0.5) -> dict[str, Any]:
    settings = settings_of(Cell(router, 20.0, seed, "fresh"), Scale(), {})
    row = row_of([replace(ANSWER, latency_s=latency_s)], ONE)
    return {"settings": settings, "row": row, "run": {"cpu_busy": cpu_busy}}
