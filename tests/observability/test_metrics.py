"""Metric names, the table in the documentation, and what one snapshot becomes."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from serve_app.observability.metrics import (
    EMULATED,
    ENGINE,
    METRICS,
    SERVE_METRICS,
    VLLM_METRICS,
    EngineMetrics,
    Metric,
    RoutingMetrics,
    counter_readings,
    gauge_readings,
    publish_emulated,
)
from tests.observability.routed import ingress_snapshot, routed_state

ROOT = Path(__file__).parents[2]
UNITS = ("seconds", "tokens", "blocks", "requests", "batches", "samples", "version", "cold", "emulated")
Labels = tuple[tuple[str, str], ...]


class FakeInstrument:
    """Counts and sets as Ray's do, and can be read."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: dict[Labels, float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert self.metric.kind == "gauge"
        self.values[self._key(tags)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert self.metric.kind == "counter"
        assert value > 0, "Ray refuses an increase of 0"
        self.values[self._key(tags)] = self.values.get(self._key(tags), 0) + value

    def _key(self, tags: dict[str, str]) -> Labels:
        assert tuple(tags) == self.metric.labels
        return tuple(tags.items())


def published(*snapshots: dict[str, Any]) -> dict[str, dict[Labels, float]]:
    """Values by metric name after publishing the snapshots one after another."""
    instruments: list[FakeInstrument] = []

    def make(metric: Metric) -> FakeInstrument:
        instruments.append(FakeInstrument(metric))
        return instruments[-1]

    metrics = RoutingMetrics(make)
    for snapshot in snapshots:
        metrics.publish(snapshot)
    return {one.metric.name: one.values for one in instruments}


def test_every_name_follows_prometheus_conventions() -> None:
    assert len({one.name for one in METRICS}) == len(METRICS)
    for one in METRICS:
        assert re.fullmatch(r"fairway_[a-z]+(_[a-z]+)*", one.name), one.name
        assert one.name.endswith("_total") == (one.kind == "counter"), one.name
        assert one.kind == "counter" or one.name.endswith(UNITS), one.name
        assert not re.search(r"_(ms|s|secs|percent|perc)(_|$)", one.name), f"{one.name} is not in a base unit"
        assert one.meaning.endswith("."), one.name


def test_a_real_snapshot_gives_every_metric_of_an_ingress_with_its_labels() -> None:
    snapshot = ingress_snapshot(routed_state())
    readings = [*counter_readings(snapshot), *gauge_readings(snapshot)]
    assert {name for name, _, _ in readings} == {one.name for one in METRICS} - {
        one.name for one in (EMULATED, *ENGINE)
    }
    labels = {one.name: one.labels for one in METRICS}
    assert all(tuple(given) == labels[name] for name, given, _ in readings)


def test_published_figures_are_those_of_the_state() -> None:
    state = routed_state(num_requests=6)
    values = published(ingress_snapshot(state))
    assert values["fairway_decisions_total"] == {(("router", "lbgr"),): 6}
    assert values["fairway_requests_total"] == {(("outcome", "finished"),): 5}
    assert values["fairway_observed_prompt_tokens_total"] == {(): 2_000}
    assert values["fairway_untokenised_total"] == {
        (("reason", "no JSON object"),): 2,
        (("reason", "body too long"),): 1,
    }
    assert values["fairway_kv_event_gaps_total"] == {(): 1}
    assert sum(values["fairway_replica_open_requests"].values()) == 1
    assert values["fairway_replica_load_seconds"].keys() == {(("replica", "a"),), (("replica", "b"),)}
    assert values["fairway_residual_cold"] == {(): 1.0}
    assert values["fairway_weights_version"] == {(): 1}


def test_counters_move_by_the_difference_when_published_again() -> None:
    state = routed_state(num_requests=6)
    first, again = ingress_snapshot(state), ingress_snapshot(state)
    later = ingress_snapshot(routed_state(num_requests=9))
    assert published(first, again) == published(first)
    counters = {one.name for one in METRICS if one.kind == "counter"}
    several, alone = published(first, again, later), published(later)
    assert {name: several[name] for name in counters} == {name: alone[name] for name in counters}


def test_decisions_after_a_change_of_router_count_for_the_new_one_only() -> None:
    before, after = ingress_snapshot(routed_state(6)), ingress_snapshot(routed_state(8), router="round-robin")
    values = published(before, after)
    assert values["fairway_decisions_total"] == {(("router", "lbgr"),): 6, (("router", "round-robin"),): 2}


def test_a_replica_that_left_goes_to_zero() -> None:
    before, after = ingress_snapshot(routed_state()), routed_state()
    after.set_replicas(["a"])
    values = published(before, ingress_snapshot(after))
    gone = (("replica", "b"),)
    assert all(values[f"fairway_replica_{name}"][gone] == 0.0 for name in ("load_seconds", "open_requests"))
    assert values["fairway_replica_indexed_blocks"][gone] == 0.0


def test_a_snapshot_without_the_ingress_parts_publishes_the_rest() -> None:
    values = published(routed_state().snapshot(110.0))
    assert values["fairway_untokenised_total"] == {} == values["fairway_kv_event_gaps_total"]
    assert values["fairway_decisions_total"]


def test_a_figure_that_is_not_finite_is_left_out() -> None:
    snapshot = ingress_snapshot(routed_state())
    snapshot["residual"]["mae_s"] = float("nan")
    assert published(snapshot)["fairway_residual_error_seconds"] == {}


@pytest.mark.parametrize(("emulated", "value"), [(True, 1.0), (False, 0.0)])
def test_a_replica_says_whether_it_is_emulated(emulated: bool, value: float) -> None:
    instrument = FakeInstrument(EMULATED)
    publish_emulated("a", emulated=emulated, instrument=lambda metric: instrument)
    assert instrument.values == {(("replica", "a"),): value}


def test_a_replica_publishes_its_engines_queue_and_counts_an_engine_that_started_anew_from_zero() -> None:
    instruments = {metric.name: FakeInstrument(metric) for metric in ENGINE}
    metrics = EngineMetrics("a", instrument=lambda metric: instruments[metric.name])
    for num_due, num_left in ((3, 2), (0, 5), (1, 1)):
        metrics.publish({"num_due": num_due, "waiting_todo_tokens": 700, "num_left_to_vllm": num_left})
    values = {name: instrument.values[(("replica", "a"),)] for name, instrument in instruments.items()}
    assert values == {
        "fairway_engine_due_requests": 1.0,
        "fairway_engine_waiting_tokens": 700.0,
        "fairway_engine_left_to_vllm_requests_total": 6,
    }


def test_vllm_and_serve_still_make_the_metrics_that_we_read() -> None:
    vllm_source = (_package("vllm") / "v1" / "metrics" / "loggers.py").read_text()
    assert [name for name in VLLM_METRICS if f'"{name.replace("vllm_", "vllm:", 1)}"' not in vllm_source] == []
    serve_files = (_package("ray") / "serve" / "_private").glob("*.py")
    serve_source = "\n".join(path.read_text() for path in serve_files)
    assert [name for name in SERVE_METRICS if f'"{name}"' not in serve_source] == []


def test_documentation_lists_exactly_the_metrics_of_the_table() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| `ray_")]
    rows = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in lines]
    ours = [row for row in rows if row[0].startswith("`ray_fairway_")]
    assert ours == [(f"`ray_{one.name}`", one.kind, ", ".join(one.labels) or "-", one.meaning) for one in METRICS]
    theirs = {row[0].strip("`"): row[1] for row in rows if row not in ours}
    assert theirs == {f"ray_{name}": kind for name, kind in {**VLLM_METRICS, **SERVE_METRICS}.items()}


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
