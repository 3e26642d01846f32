"""`fairway-serve simulate`: a table, rows as JSON, and errors that name what may be said."""

import json
from pathlib import Path

import pytest

from serve_app.cli import main


def test_gsp_prints_ours_beside_the_baseline_and_writes_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gsp.json"
    assert main(["simulate", "gsp", "--replicas", "2", "--rate", "12", "--json", str(out)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    written = json.loads(out.read_text())
    assert [row["router"] for row in written["rows"]] == ["round-robin", "lbgr"]
    assert len(lines) == 2
    assert "hit_rate" in header.split()
    assert written["rows"][1]["hit_rate"] > written["rows"][0]["hit_rate"]


def test_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    assert capsys.readouterr().out.startswith("gsp")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "one of gsp"), (["nothing"], "'nothing'"), (["gsp", "--router", "nearest"], "nearest")],
)
def test_unknown_name_is_refused_with_what_may_be_said(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert says in capsys.readouterr().err
