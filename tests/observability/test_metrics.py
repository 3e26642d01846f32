"""Metric names, the table in the documentation, and what one snapshot becomes."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import RouterSettings
from serve_app.observability.metrics import (
    EMULATED,
    ENGINE,
    METRICS,
    SERVE_METRICS,
    VLLM_METRICS,
    EngineMetrics,
    Metric,
    RoutingMetrics,
    publish_emulated,
)
from serve_app.observability.readings import FOLLOWED, REPLICA_GAUGES, counter_readings, gauge_readings
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.routing_state import RouteRequest, RoutingState
from serve_app.router.wishes import BAD_PIN
from tests.observability.routed import ingress_snapshot, routed_state

ROOT = Path(__file__).parents[2]
UNITS = ("seconds", "tokens", "blocks", "requests", "batches", "entries", "bytes", "ratio", "samples", "predictions")
STATES = ("version", "cold", "emulated", "untrusted")
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
        assert one.kind == "counter" or one.name.endswith((*UNITS, *STATES)), one.name
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
    assert values["fairway_kv_event_batches_dead_total"] == {(): 3}
    assert values["fairway_decisions_cold_total"] == {(): 6}
    assert values["fairway_decisions_stale_view_total"] == {}
    assert values["fairway_wishes_total"] == {(("note", FOLLOWED),): 4, (("note", BAD_PIN),): 1}
    assert sum(values["fairway_replica_open_requests"].values()) == 1
    assert sum(values["fairway_replica_predictions"].values()) == 5
    assert values["fairway_replica_load_seconds"].keys() == {(("replica", "a"),), (("replica", "b"),)}
    assert values["fairway_residual_cold"] == {(): 1.0}
    assert values["fairway_weights_version"] == {(): 1}
    assert values["fairway_index_entries"] == {(): state.index.num_entries}
    assert values["fairway_index_max_entries"] == {(): state.index.max_entries}


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
    assert {name: values[name][gone] for name in REPLICA_GAUGES} == dict.fromkeys(REPLICA_GAUGES, 0.0)


def test_a_snapshot_without_the_ingress_parts_publishes_the_rest() -> None:
    values = published(routed_state().snapshot(110.0))
    assert values["fairway_untokenised_total"] == {} == values["fairway_kv_event_gaps_total"]
    assert values["fairway_kv_event_lag_seconds"] == {} == values["fairway_wishes_total"]
    assert values["fairway_decisions_total"]


def test_a_replica_shows_the_errors_of_its_own_predictions() -> None:
    state = RoutingState(RouterSettings(), PrefillProfile.flat(), block_size_tokens=16)
    state.set_replicas(["a", "b"])
    for observed_s in (0.5, 0.7):
        state.estimator.observe("a", {"queue_s": 0.1}, 0.4, observed_s)
    values = published(ingress_snapshot(state))
    a, b = (("replica", "a"),), (("replica", "b"),)
    assert values["fairway_replica_predictions"] == {a: 2, b: 0}
    assert values["fairway_replica_error_seconds"] == {a: pytest.approx(0.2), b: 0.0}
    assert values["fairway_replica_bias_seconds"][a] == pytest.approx(0.2)
    assert values["fairway_replica_coverage_ratio"] == {a: 0.0, b: 0.0}
    assert values["fairway_residual_interval_seconds"] == {(): values["fairway_replica_interval_seconds"][a]}


def test_only_a_replica_whose_events_are_untrusted_shows_so_and_counts_decisions() -> None:
    state = routed_state(2)
    state.trust_events_of(lambda replica_id: replica_id == "a")
    state.decide(RouteRequest("late", 400), ["a", "b"], 108.0)
    values = published(ingress_snapshot(state))
    assert values["fairway_replica_events_untrusted"] == {(("replica", "a"),): 0.0, (("replica", "b"),): 1.0}
    assert values["fairway_decisions_stale_view_total"] == {(): 1}


def test_a_feed_without_an_event_shows_its_silence_only() -> None:
    values = published(ingress_snapshot(routed_state()))
    assert values["fairway_kv_event_silence_seconds"] == {(("replica", "a"),): 0.5, (("replica", "b"),): 3.0}
    assert values["fairway_kv_event_lag_seconds"] == {(("replica", "a"),): 0.01}


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
