"""docs/results.md is what `scripts/results` makes, and every number in a commentary comes from the results."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from results import main
from results_page import duration, page
from results_references import resolved

from serve_app.sim.report import Results, Target, write_json

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"phase": "all", "eviction": "lru", "router": "lbgr", "requests": 10}
RESULTS = Results(
    experiment="flood",
    seed=0,
    parameters={
        "description": "A backlog, then hits.",
        "replicas": 1,
        "rates": [0.8, 1.2],
        "gpu": {"name": "L40"},
        "cpu_s": 600.0,
    },
    versions={"vllm": "0.29.0"},
    rows=[
        {"scenario": "flood-2k", "ordering": "fcfs", **NAMES, "ttft_p99_s": 20.0, "ttft_max_s": 25.0, "starved": 0},
        {"scenario": "flood-6k", "ordering": "fcfs", **NAMES, "ttft_p99_s": 30.0, "ttft_max_s": 35.0, "starved": 0},
        {"scenario": "flood-2k", "ordering": "fairway", **NAMES, "ttft_p99_s": 10.0, "ttft_max_s": 15.0, "starved": 4},
        {"scenario": "flood-6k", "ordering": "fairway", **NAMES, "ttft_p99_s": 15.0, "ttft_max_s": 16.0, "starved": 1},
    ],
    targets=[
        Target.at_most("flood-2k/fairway/worst", 15.0, 27.5),
        Target.at_most("flood-2k/fairway/median", 3.0, 2.0),
        Target.at_most("flood-6k/fairway/worst", 16.0, 38.5),
    ],
    approximations=["No network: TTFT lacks it."],
    elapsed_s=600.0,
)
COMMENTARY = """| claim | published | measured | verdict |
| --- | --- | --- | --- |
| worst miss | 22 s | {{max ttft_max_s ordering=fairway}} s | holds |
"""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    directory = tmp_path / "results"
    directory.mkdir()
    write_json(directory / "flood.json", RESULTS)
    write_json(directory / "another.json", replace(RESULTS, experiment="another", targets=(), parameters={}))
    traces = [
        {**row, "scenario": f"filing-seed{seed}", "phase": "spike"}
        for seed in range(2)
        for row in (RESULTS.rows[0], RESULTS.rows[2])
    ]
    targets = [Target.at_most(f"filing-seed{seed}/fairway/spike/p99", 1.0 + seed, 1.5) for seed in range(2)]
    write_json(directory / "dynamic.json", replace(RESULTS, experiment="dynamic", rows=traces, targets=targets))
    (directory / "flood.md").write_text(COMMENTARY)
    (directory / "README.md").write_text("no section")
    (directory / "validation.md").write_text("By hand.\n")
    return tmp_path


def section(text: str, name: str) -> str:
    return text.partition(f"\n## {name}\n")[2].partition("\n## ")[0].strip()


def test_the_committed_page_is_what_the_script_makes() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "results.py"), "--check"]
    run = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_sections_follow_the_experiments_order_then_the_alphabet(docs: Path) -> None:
    text = page(docs / "results")
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## dynamic",
        "## flood",
        "## another",
        "## validation",
    ]
    assert (
        "Experiments: [dynamic](#dynamic), [flood](#flood), [another](#another), [validation](#validation).\n" in text
    )
    assert "Their runs took 20 min of CPU time." in text
    assert section(text, "validation") == "By hand."


def test_a_section_says_what_how_and_what_came_out(docs: Path) -> None:
    assert (
        section(page(docs / "results"), "flood")
        == """A backlog, then hits.

```
fairway-serve simulate flood --seed 0
```

| claim | published | measured | verdict |
| --- | --- | --- | --- |
| worst miss | 22 s | 16.0 s | holds |

Eviction lru, router lbgr.

| scenario | ordering | requests | p99 s | max s | starved |
| --- | --- | ---: | ---: | ---: | ---: |
| flood-2k | fcfs | 10 | 20.0 | 25.0 | 0 |
| flood-6k | fcfs | 10 | 30.0 | 35.0 | 0 |
| flood-2k | fairway | 10 | 10.0 | 15.0 | 4 |
| flood-6k | fairway | 10 | 15.0 | 16.0 | 1 |

Targets met: 2 of 3.

| target | value | bound | met |
| --- | ---: | ---: | ---: |
| flood-2k/fairway/worst | 15.0 | 27.5 | yes |
| flood-2k/fairway/median | 3.00 | 2.00 | no |
| flood-6k/fairway/worst | 16.0 | 38.5 | yes |

Approximations:

- No network: TTFT lacks it.

Seed 0; replicas 1, rates (0.8, 1.2), gpu (name L40), vllm 0.29.0. The runs took 10 min of CPU time."""
    )


def test_traces_of_a_family_are_one_row(docs: Path) -> None:
    text = section(page(docs / "results"), "dynamic")
    assert (
        "| ordering | traces | traces meeting all | targets met, mean | of | p99 s | / FCFS's | max s | starved |"
        in text
    )
    assert "| fairway | 2 | 1 | 0.5 | 1 | 10.0 | 0.50 | 15.0 | 8 |" in text
    assert "The 4 rows of single traces and phases are in [dynamic.json](results/dynamic.json)." in text


def test_long_tables_are_folded_and_very_long_ones_cut(docs: Path) -> None:
    rows = [{**RESULTS.rows[0], "scenario": f"case-{number}"} for number in range(401)]
    write_json(docs / "results" / "flood.json", replace(RESULTS, rows=[*RESULTS.rows, *rows[:60]]))
    text = section(page(docs / "results"), "flood")
    assert "<details><summary>64 rows</summary>\n\nPhase" not in text
    assert "<details><summary>64 rows</summary>\n\nEviction lru, router lbgr.\n\n| scenario" in text
    write_json(docs / "results" / "flood.json", replace(RESULTS, rows=[*RESULTS.rows, *rows]))
    text = section(page(docs / "results"), "flood")
    assert "case-395 |" in text
    assert "case-396 |" not in text
    assert "All 405 rows are in [flood.json](results/flood.json)." in text


def test_without_results_the_page_says_so(tmp_path: Path) -> None:
    assert page(tmp_path / "results").endswith("No results are committed yet.\n")


def test_check_fails_with_the_difference_until_the_page_is_made(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--docs", str(docs)]) == 1
    assert "is not what would be made; run `scripts/results`" in capsys.readouterr().err
    assert main(["--docs", str(docs)]) == 0
    assert main(["--check", "--docs", str(docs)]) == 0
    made = docs / "results.md"
    made.write_text(made.read_text().replace("16.0 s | holds", "15.0 s | holds"))
    assert main(["--check", "--docs", str(docs)]) == 1
    assert "-| worst miss | 22 s | 15.0 s | holds |" in capsys.readouterr().err


def test_a_wrong_file_is_one_line_on_stderr(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (docs / "results" / "validation.md").write_text("{{ttft_p50_s ordering=fairway}}")
    assert main(["--docs", str(docs)]) == 1
    error = capsys.readouterr().err
    assert "validation.md: {{ttft_p50_s ordering=fairway}} matches no row" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("ttft_p99_s ordering=fairway", "12.5"),
        ("max ttft_p99_s ordering=f*", "30.0"),
        ("min ttft_p99_s scenario=flood-6k", "15.0"),
        ("sum starved ordering=fairway", "5"),
        ("ttft_p99_s ordering=fairway / ordering=fcfs", "0.50"),
        ("max ttft_max_s ordering=fairway / max ttft_p99_s ordering=fcfs", "0.53"),
        ("ttft_max_s scenario=flood-2k ordering=fairway / ordering=fcfs", "0.60"),
        ("max ttft_max_s ordering=fairway / ordering=fcfs", "0.46"),
        ("met *", "2 of 3"),
        ("met flood-2k/fairway/*", "1 of 2"),
        ("traces flood-*/fairway/*", "1 of 2"),
    ],
)
def test_reference_becomes_the_measured_number(reference: str, text: str) -> None:
    assert resolved(f"a {{{{{reference}}}}} b", RESULTS) == f"a {text} b"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("ttft_p50_s ordering=fcfs", "matches no row with a ttft_p50_s"),
        ("ttft_p99_s ordering=peek", "matches no row"),
        ("max", "is no reference"),
        ("max ttft_p99_s fcfs", "is no reference"),
        ("met gsp/*", "no target is named like 'gsp/"),
        ("ttft_p99_s ordering=fairway / starved ordering=fcfs", "divides by 0"),
    ],
)
def test_reference_to_nothing_is_an_error(reference: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolved(f"{{{{{reference}}}}}", RESULTS)


@pytest.mark.parametrize(("elapsed_s", "text"), [(8.4, "8 s"), (600.0, "10 min"), (9_000.0, "2 h 30 min")])
def test_durations_are_short(elapsed_s: float, text: str) -> None:
    assert duration(elapsed_s) == text
