"""Names, units and meaning of every Prometheus metric that fairway-serve adds, and their way out by Ray's exporter.

Ray puts `ray_` before each name. vLLM's and Serve's own metrics are used where they exist and not repeated; the ones
that our dashboard reads are listed in `VLLM_METRICS` and `SERVE_METRICS`. docs/metrics.md holds the same tables; what
an ingress' snapshot says for each name is in `readings`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ray.util import metrics as ray_metrics

from serve_app.observability.readings import REPLICA_GAUGES, counter_readings, gauge_readings

EXPORT_PREFIX = "ray_"
"""What Ray's exporter puts before every name, ours, vLLM's and Serve's alike."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. The unit is the name's last word but `total`; without one it is a plain count."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: tuple[str, ...] = ()


EMULATED = Metric("fairway_emulated", "gauge", "1 where the replica's GPU is emulated, else 0.", ("replica",))
ENGINE: tuple[Metric, ...] = (
    Metric("fairway_engine_due_requests", "gauge", "Waiting requests that may be overtaken no further.", ("replica",)),
    Metric("fairway_engine_waiting_tokens", "gauge", "What waiting requests still have to compute.", ("replica",)),
    Metric(
        "fairway_engine_left_to_vllm_requests_total",
        "counter",
        "Requests that waited for a grammar, remote KV or input, in vLLM's own order.",
        ("replica",),
    ),
)
"""With `EMULATED`, what a replica publishes of itself; the ingress publishes all others."""

METRICS: tuple[Metric, ...] = (
    Metric("fairway_decisions_total", "counter", "Routing decisions, by the rule in force when counted.", ("router",)),
    Metric("fairway_decisions_unknown_length_total", "counter", "Decisions for prompts of unknown length."),
    Metric("fairway_decisions_cold_total", "counter", "Decisions without the residual model, which was cold."),
    Metric("fairway_decisions_stale_view_total", "counter", "Decisions among candidates with untrusted KV events."),
    Metric("fairway_decisions_home_overloaded_total", "counter", "Decisions that left a prefix's overloaded home."),
    Metric("fairway_decisions_explored_total", "counter", "Decisions drawn at random."),
    Metric("fairway_wishes_total", "counter", "Wishes of clients by note, `followed` where there is none.", ("note",)),
    Metric("fairway_untokenised_total", "counter", "Bodies routed without token ids, by reason.", ("reason",)),
    Metric("fairway_requests_total", "counter", "Requests that ended, by outcome.", ("outcome",)),
    Metric("fairway_prompt_tokens_total", "counter", "Prompt tokens of all decisions."),
    Metric("fairway_predicted_hit_tokens_total", "counter", "Prompt tokens predicted to hit on the picked replica."),
    Metric("fairway_observed_prompt_tokens_total", "counter", "Prompt tokens of requests whose first token was seen."),
    Metric("fairway_observed_cached_tokens_total", "counter", "Of those, tokens that the engines found cached."),
    Metric("fairway_moved_requests_total", "counter", "Requests that opened on another replica than the one picked."),
    Metric("fairway_orphaned_reservations_total", "counter", "Reservations released as unknown to their replica."),
    Metric("fairway_lifecycle_batches_total", "counter", "Batches of life-cycle events taken from known replicas."),
    Metric("fairway_lifecycle_batches_lost_total", "counter", "Sequence numbers of life-cycle batches skipped."),
    Metric("fairway_lifecycle_batches_late_total", "counter", "Life-cycle batches repeated, late or of the dead."),
    Metric("fairway_replica_restarts_total", "counter", "Times that a replica showed a new incarnation."),
    Metric("fairway_kv_event_batches_total", "counter", "Batches of KV events applied to the prefix index."),
    Metric("fairway_kv_event_batches_replayed_total", "counter", "Of those, batches that came by replay."),
    Metric("fairway_kv_event_batches_dead_total", "counter", "Batches of a former incarnation, thrown away."),
    Metric("fairway_kv_events_total", "counter", "KV events applied to the prefix index."),
    Metric("fairway_kv_event_gaps_total", "counter", "Gaps in the sequence of KV events."),
    Metric("fairway_kv_event_resets_total", "counter", "Times that a replica's part of the prefix index was cleared."),
    Metric("fairway_kv_event_restarts_total", "counter", "Of those, because its engine had restarted."),
    Metric("fairway_kv_event_decode_errors_total", "counter", "KV-event messages that could not be read."),
    Metric("fairway_index_forgotten_blocks_total", "counter", "KV blocks given up because the prefix index was full."),
    Metric("fairway_residual_drifts_total", "counter", "Times that the residual model started anew."),
    Metric("fairway_replica_load_seconds", "gauge", "Assigned work that is left, seconds of prefill.", ("replica",)),
    Metric("fairway_replica_open_requests", "gauge", "Open reservations, decoding ones included.", ("replica",)),
    Metric("fairway_replica_indexed_blocks", "gauge", "KV blocks that the prefix index credits.", ("replica",)),
    Metric("fairway_replica_events_untrusted", "gauge", "1 while its KV events are untrusted, else 0.", ("replica",)),
    Metric("fairway_replica_predictions", "gauge", "Predicted TTFTs that could be scored.", ("replica",)),
    Metric("fairway_replica_error_seconds", "gauge", "Mean absolute error of its predicted TTFTs.", ("replica",)),
    Metric("fairway_replica_bias_seconds", "gauge", "Mean of observed minus predicted TTFT.", ("replica",)),
    Metric("fairway_replica_interval_seconds", "gauge", "Half-width of the interval for 9 of 10 TTFTs.", ("replica",)),
    Metric("fairway_replica_coverage_ratio", "gauge", "Share of TTFTs that its interval held.", ("replica",)),
    Metric("fairway_kv_event_silence_seconds", "gauge", "Time since its KV-event feed was last heard.", ("replica",)),
    Metric("fairway_kv_event_lag_seconds", "gauge", "Age of its last KV-event batch when applied.", ("replica",)),
    Metric("fairway_residual_samples", "gauge", "Observations since the residual model last started anew."),
    Metric("fairway_residual_cold", "gauge", "1 while the residual model has too few observations and adds 0, else 0."),
    Metric("fairway_residual_error_seconds", "gauge", "Mean absolute error of the predicted TTFT."),
    Metric("fairway_residual_bias_seconds", "gauge", "Mean of observed minus predicted TTFT."),
    Metric("fairway_residual_interval_seconds", "gauge", "Half-width of the interval for 9 of 10 TTFTs."),
    Metric("fairway_residual_coverage_ratio", "gauge", "Share of TTFTs that their interval held."),
    Metric("fairway_explicit_error_seconds", "gauge", "Mean absolute error of the explicit terms alone."),
    Metric("fairway_pressure_requests", "gauge", "Requests that a second of wasted prefill would delay."),
    Metric("fairway_index_entries", "gauge", "(replica, KV block) pairs in the prefix index."),
    Metric("fairway_index_max_entries", "gauge", "Most that it may hold."),
    Metric("fairway_index_expected_entries", "gauge", "Pairs with credit that no KV event has confirmed yet."),
    Metric("fairway_index_bytes", "gauge", "Estimated memory of the prefix index."),
    Metric("fairway_weights_version", "gauge", "Version of the routing document in force."),
    EMULATED,
    *ENGINE,
)

VLLM_METRICS: Mapping[str, str] = {
    "vllm_time_to_first_token_seconds": "histogram",
    "vllm_e2e_request_latency_seconds": "histogram",
    "vllm_request_queue_time_seconds": "histogram",
    "vllm_request_time_per_output_token_seconds": "histogram",
    "vllm_num_requests_running": "gauge",
    "vllm_num_requests_waiting": "gauge",
    "vllm_kv_cache_usage_perc": "gauge",
    "vllm_prefix_cache_queries": "counter",
    "vllm_prefix_cache_hits": "counter",
    "vllm_num_preemptions": "counter",
    "vllm_generation_tokens": "counter",
}
"""vLLM's own that the dashboard reads; a counter is exported with `_total`, a histogram with `_bucket`."""

SERVE_METRICS: Mapping[str, str] = {
    "serve_autoscaling_target_replicas": "gauge",
    "serve_deployment_replica_healthy": "gauge",
    "serve_haproxy_ingress_router_latency_ms": "histogram",
    "serve_haproxy_ingress_router_failures": "counter",
}
"""Ray Serve's own that the dashboard reads."""


class RoutingMetrics:
    """Publishes one ingress' snapshots, off the request path; one per process, told apart by Ray's WorkerId."""

    def __init__(self, instrument: Callable[[Metric], Any] | None = None) -> None:
        """Args: instrument: makes what a metric is written to; Ray's `Counter` or `Gauge` when not given."""
        make = instrument or _exported
        self._gauges = {one.name: make(one) for one in METRICS if one.kind == "gauge"}
        self._counters = {one.name: make(one) for one in METRICS if one.kind == "counter"}
        self._counted: dict[tuple[str, str], float] = {}
        self._replicas: set[str] = set()

    def publish(self, snapshot: Mapping[str, Any]) -> None:
        """Set every gauge and move every counter to what the snapshot says.

        A replica that left goes to 0, for Ray's gauges can't be taken back. A figure that is not finite is left out.

        Args:
            snapshot: as for `readings.counter_readings`.
        """
        for name, labels, total in counter_readings(snapshot):
            self._advance(name, labels, total)
        for name, labels, value in gauge_readings(snapshot):
            if math.isfinite(value):
                self._gauges[name].set(value, tags=labels)
        self._forget_departed({replica["replica_id"] for replica in snapshot["replicas"]})

    def _advance(self, name: str, labels: dict[str, str], total: float) -> None:
        # The router in force labels an increase; the total behind it is one for all routers.
        key = (name, "" if "router" in labels else "/".join(labels.values()))
        increase = total - self._counted.get(key, 0)
        self._counted[key] = total
        if increase > 0:
            self._counters[name].inc(increase, tags=labels)

    def _forget_departed(self, present: set[str]) -> None:
        for departed in self._replicas - present:
            for name in REPLICA_GAUGES:
                self._gauges[name].set(0.0, tags={"replica": departed})
        self._replicas = present


def publish_emulated(replica_id: str, *, emulated: bool, instrument: Callable[[Metric], Any] | None = None) -> None:
    """Say once, in the replica's own process, whether its GPU is emulated; `instrument` as for `RoutingMetrics`."""
    (instrument or _exported)(EMULATED).set(float(emulated), tags={"replica": replica_id})


class EngineMetrics:
    """Publishes what one replica's engine says of its waiting queue, in the replica's own process."""

    def __init__(self, replica_id: str, instrument: Callable[[Metric], Any] | None = None) -> None:
        """`instrument` as for `RoutingMetrics`."""
        self._due, self._tokens, self._left = map(instrument or _exported, ENGINE)
        self._labels = {"replica": replica_id}
        self._num_left = 0

    def publish(self, stats: Mapping[str, Any]) -> None:
        """`stats`: of `FairwayScheduler.policy_stats`; an engine that started anew counts from 0."""
        self._due.set(float(stats["num_due"]), tags=self._labels)
        self._tokens.set(float(stats["waiting_todo_tokens"]), tags=self._labels)
        num_left = stats["num_left_to_vllm"]
        increase = num_left - self._num_left if num_left >= self._num_left else num_left
        self._num_left = num_left
        if increase > 0:
            self._left.inc(increase, tags=self._labels)


def _exported(metric: Metric) -> Any:
    kinds = {"counter": ray_metrics.Counter, "gauge": ray_metrics.Gauge}
    return kinds[metric.kind](metric.name, description=metric.meaning, tag_keys=metric.labels)
