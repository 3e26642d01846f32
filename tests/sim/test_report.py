"""The document of results: the same bytes for the same results, and nothing that JSON cannot hold."""

import json
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.sim import report
from serve_app.sim.report import Results, Target, read_json, to_json, versions, write_json

RESULTS = Results(
    experiment="gsp",
    seed=3,
    parameters={"description": "groups", "rate_per_s": 12.0, "orders": ("a", "b"), "nested": {"x": np.int64(1)}},
    versions={"vllm": "0.29.0"},
    rows=[
        {"ordering": "fcfs", "ttft_p50_s": 1.23456789, "requests": np.int64(7), "starved": None},
        {"ordering": "fairway", "ttft_p50_s": np.float64(1e-7) / 3, "requests": 1_234_567, "default": True},
    ],
    targets=[Target.at_most("gsp/fairway/p50", 1.0, 2.0), Target.at_least("gsp/fairway/hit", 0.2, 0.3)],
    approximations=["No network: TTFT lacks it."],
    elapsed_s=12.3456789,
)


def test_document_has_the_documented_fields_one_row_a_line_and_six_digits() -> None:
    assert to_json(RESULTS) == (
        "{\n"
        ' "experiment": "gsp",\n'
        ' "seed": 3,\n'
        ' "parameters": {\n'
        '  "description": "groups",\n'
        '  "rate_per_s": 12.0,\n'
        '  "orders": ["a","b"],\n'
        '  "nested": {"x":1}\n'
        " },\n"
        ' "versions": {\n'
        '  "vllm": "0.29.0"\n'
        " },\n"
        ' "approximations": [\n'
        '  "No network: TTFT lacks it."\n'
        " ],\n"
        ' "targets": [\n'
        '  {"name":"gsp/fairway/p50","value":1.0,"bound":2.0,"met":true},\n'
        '  {"name":"gsp/fairway/hit","value":0.2,"bound":0.3,"met":false}\n'
        " ],\n"
        ' "rows": [\n'
        '  {"ordering":"fcfs","ttft_p50_s":1.23457,"requests":7,"starved":null},\n'
        '  {"ordering":"fairway","ttft_p50_s":3.33333e-08,"requests":1234567,"default":true}\n'
        " ],\n"
        ' "elapsed_s": 12.3457\n'
        "}\n"
    )


def test_what_was_written_reads_back_and_writes_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write_json(first, RESULTS)
    found = read_json(first)
    write_json(second, found)
    assert first.read_bytes() == second.read_bytes()
    assert found.rows[0] == {"ordering": "fcfs", "ttft_p50_s": 1.23457, "requests": 7, "starved": None}
    assert (found.targets, found.elapsed_s) == (RESULTS.targets, 12.3457)


def test_without_elapsed_time_two_runs_are_the_same_bytes(tmp_path: Path) -> None:
    later = replace(RESULTS, elapsed_s=99.0)
    assert to_json(RESULTS) != to_json(later)
    assert to_json(RESULTS, elapsed=False) == to_json(later, elapsed=False)
    write_json(tmp_path / "one.json", later, elapsed=False)
    assert read_json(tmp_path / "one.json").elapsed_s is None


def test_empty_lists_are_valid_and_may_be_missing(tmp_path: Path) -> None:
    empty = Results("gsp", 0, {}, {}, ())
    assert json.loads(to_json(empty)) == {
        "experiment": "gsp",
        "seed": 0,
        "parameters": {},
        "versions": {},
        "approximations": [],
        "targets": [],
        "rows": [],
    }
    path = tmp_path / "hand.json"
    path.write_text('{"experiment": "gsp", "seed": 0, "parameters": {}, "versions": {}, "rows": []}')
    assert to_json(read_json(path)) == to_json(empty)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"ordering": "a"}, {"ttft_p50_s": float("inf")}], r"rows\[1\]\.ttft_p50_s is inf; it must be finite"),
        ([{"hit_rate": np.float64("nan")}], r"rows\[0\]\.hit_rate is nan"),
        ([{"path": Path("x")}], r"rows\[0\]\.path is a \w*Path; it must be"),
    ],
)
def test_what_json_cannot_hold_is_named(rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_json(replace(RESULTS, rows=rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is a list; it must be an object"),
        ('{"experiment": "x"}', r"fields \['parameters', 'rows', 'seed', 'versions'\] are missing or unknown"),
        (to_json(RESULTS).replace('"seed"', '"sead"'), r"\['sead', 'seed'\]"),
        (to_json(RESULTS).replace('"met":true', '"mett":true'), "a row or target is no such object"),
        ('{"experiment": "x", "seed": 0, "parameters": {}, "versions": {}, "rows": [1]}', "a row or target"),
    ],
)
def test_file_that_is_no_results_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        read_json(path)
    assert "wrong.json" in str(raised.value)


def test_a_target_is_met_at_its_bound() -> None:
    assert Target.at_most("x", 2.0, 2.0).met
    assert not Target.at_most("x", 2.01, 2.0).met
    assert Target.at_least("x", 2.0, 2.0).met
    assert not Target.at_least("x", 1.99, 2.0).met


def test_versions_are_those_installed() -> None:
    found = versions()
    assert list(found) == ["fairway-serve", "vllm", "ray", "river", "numpy", "python"]
    assert (found["numpy"], found["python"]) == (np.__version__, platform.python_version())


def test_a_version_of_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "DISTRIBUTIONS", {"none": ("no-such-one", "nor-this"), "numpy": ("no-such", "numpy")})
    assert list(versions()) == ["numpy", "python"]


def test_the_largest_grid_stays_under_a_megabyte() -> None:
    """Forty traces, ten orderings, four phases, six targets a trace and ordering."""
    row = {
        "scenario": "retrieval-seed9",
        "phase": "burst",
        "ordering": "fairway-absolute-wait",
        "eviction": "rlt",
        "router": "lbgr",
        "requests": 1_234,
        **{f"ttft_{which}_s": 12.34567 for which in ("p50", "p95", "p99", "max")},
        **{f"latency_p{percentile}_s": 12.34567 for percentile in (50, 95, 99)},
        "hit_rate": 0.4567891,
        "load_max_over_mean": 1.0,
        "starved": 123,
        "starved_own": 123,
    }
    targets = [Target.at_most("retrieval-seed9/fairway/spike/p99", 1.234567, 1.234567)] * (40 * 10 * 6)
    assert len(to_json(replace(RESULTS, rows=[row] * (40 * 10 * 4), targets=targets)).encode()) < 1_000_000
