"""`fairway-serve simulate`: a table, results as JSON, plots, and errors that name what may be said."""

import json
from pathlib import Path

import pytest

from serve_app.cli import main
from serve_app.sim.catalogue import DESCRIPTIONS
from serve_app.sim.experiments import EXPERIMENTS, Experiment, Options
from serve_app.sim.experiments.ordering import ordered
from serve_app.sim.grid import Case
from tests.sim.small_cases import small_scenario

POLICIES = [ordered("fcfs"), ordered("fairway")]


def small(options: Options) -> list[Case]:
    """Two runs of a second."""
    return [Case(small_scenario(f"small-seed{seed}", seed), one) for seed in options.seeds(1) for one in POLICIES]


@pytest.fixture
def gsp_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = {**EXPERIMENTS, "gsp": Experiment("gsp", "Small.", small, approximations=("All of it.",))}
    monkeypatch.setattr("serve_app.sim.experiment.EXPERIMENTS", replaced)


@pytest.mark.usefixtures("gsp_is_small")
def test_policies_stand_side_by_side_in_table_json_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "gsp.json", tmp_path / "gsp.html"
    arguments = ["--seed", "3", "--traces", "2", "--jobs", "1", "--json", str(out), "--html", str(page)]
    assert main(["simulate", "gsp", *arguments]) == 0
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    names = [(row["scenario"], row["ordering"], row["starved"]) for row in written["rows"]]
    assert names == [(f"small-seed{seed}", ordering, 0) for seed in (3, 4) for ordering in ("fcfs", "fairway")]
    assert (written["experiment"], written["seed"]) == ("gsp", 3)
    assert "approximation: All of it." in printed
    assert "fairway" in printed
    assert "fairway" in page.read_text()


@pytest.mark.usefixtures("gsp_is_small")
def test_interrupted_experiment_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in ("first", "second"):
        arguments = ["--jobs", "1", "--resume", str(tmp_path / "runs"), "--json", str(tmp_path / out)]
        assert main(["simulate", "gsp", *arguments]) == 0
    first, second = (json.loads((tmp_path / out).read_text()) for out in ("first", "second"))
    assert second["rows"] == first["rows"]
    assert second["parameters"]["cpu_s"] == first["parameters"]["cpu_s"] > 0
    assert len(list((tmp_path / "runs").glob("*.npz"))) == len(POLICIES)


def test_every_experiment_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS) == list(DESCRIPTIONS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of dynamic"),
        (["nothing"], "'nothing'"),
        (["gsp", "--scenario", "gsp-9"], "gsp-8-seed0, gsp-8-seed1"),
        (["gsp", "--traces", "0"], "--traces"),
        (["trace", "--data", "/nowhere"], "/nowhere"),
    ],
)
def test_unknown_name_is_refused_with_what_may_be_said(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert says in capsys.readouterr().err
