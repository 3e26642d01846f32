"""The committed dashboard: no drift, only known metrics, each queried as its kind wants, panels that do not overlap."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.observability import grafana
from serve_app.observability.metrics import EXPORT_PREFIX, METRICS, SERVE_METRICS, VLLM_METRICS

ROOT = Path(__file__).parents[2]
KINDS = {**{one.name: one.kind for one in METRICS}, **VLLM_METRICS, **SERVE_METRICS}
SUFFIX = {"counter": "_total", "histogram": "_bucket", "gauge": ""}


def exported(name: str, kind: str) -> str:
    """The name under which Ray's exporter shows a metric."""
    suffix = SUFFIX[kind]
    return EXPORT_PREFIX + (name if name.endswith(suffix) else name + suffix)


EXPORTED = {exported(name, kind): kind for name, kind in KINDS.items()}


def panels() -> list[dict[str, Any]]:
    return [one for one in grafana.dashboard()["panels"] if one["type"] != "row"]


def queries() -> list[str]:
    return [target["expr"] for one in panels() for target in one["targets"]]


def test_the_committed_file_is_what_the_code_makes() -> None:
    committed = (ROOT / grafana.TARGET).read_text()
    assert committed == grafana.as_json(), "run `python -m serve_app.observability.grafana`"
    assert json.loads(committed) == grafana.dashboard()


@pytest.mark.parametrize("query", queries())
def test_a_query_reads_only_known_metrics_in_the_way_of_their_kind(query: str) -> None:
    names = re.findall(rf"\b{EXPORT_PREFIX}\w+", query)
    assert names
    for name in names:
        assert name in EXPORTED, name
        over_time = re.search(rf"\b(rate|increase)\({name}\[\$__rate_interval\]\)", query)
        assert bool(over_time) == (EXPORTED[name] != "gauge"), f"{name} is a {EXPORTED[name]}"
    assert query.count("(") == query.count(")")


def test_labels_in_queries_and_legends_are_labels_of_the_metrics() -> None:
    labels = {EXPORT_PREFIX + one.name: set(one.labels) for one in METRICS}
    for one in panels():
        for target in one["targets"]:
            grouped = set(re.findall(r"by \((\w+)\)", target["expr"])) - {"le"}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == grouped, one["title"]
            ours = [labels[name] for name in re.findall(r"ray_fairway_\w+", target["expr"])]
            assert all(grouped <= known for known in ours), one["title"]


def test_panels_fill_the_grid_without_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for one in grafana.dashboard()["panels"]:
        grid = one["gridPos"]
        mine = {(grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])}
        assert not mine & cells, one["title"]
        assert max(x for x, _ in mine) < 24, one["title"]
        cells |= mine


def test_every_panel_has_its_own_id_title_and_meaning() -> None:
    everything = grafana.dashboard()["panels"]
    assert len({one["id"] for one in everything}) == len(everything)
    assert len({one["title"] for one in everything}) == len(everything)
    assert all(one["description"] and one["fieldConfig"]["defaults"]["unit"] for one in panels())
    refs = [[target["refId"] for target in one["targets"]] for one in panels()]
    assert all(len(set(one)) == len(one) for one in refs)
