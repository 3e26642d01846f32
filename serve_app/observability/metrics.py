"""Names, units and meaning of every Prometheus metric that fairway-serve adds, and their way out by Ray's exporter.

Ray puts `ray_` before each name. vLLM's and Serve's own metrics are used where they exist and not repeated; the ones
that our dashboard reads are listed in `VLLM_METRICS` and `SERVE_METRICS`. docs/metrics.md holds the same tables.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ray.util import metrics as ray_metrics

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
    Metric("fairway_kv_event_gaps_total", "counter", "Gaps in the sequence of KV events."),
    Metric("fairway_kv_event_resets_total", "counter", "Times that a replica's part of the prefix index was cleared."),
    Metric("fairway_kv_event_decode_errors_total", "counter", "KV-event messages that could not be read."),
    Metric("fairway_index_forgotten_blocks_total", "counter", "KV blocks given up because the prefix index was full."),
    Metric("fairway_residual_drifts_total", "counter", "Times that the residual model started anew."),
    Metric("fairway_replica_load_seconds", "gauge", "Assigned work that is left, seconds of prefill.", ("replica",)),
    Metric("fairway_replica_open_requests", "gauge", "Open reservations, decoding ones included.", ("replica",)),
    Metric("fairway_replica_indexed_blocks", "gauge", "KV blocks that the prefix index credits.", ("replica",)),
    Metric("fairway_residual_samples", "gauge", "Observations since the residual model last started anew."),
    Metric("fairway_residual_cold", "gauge", "1 while the residual model has too few observations and adds 0, else 0."),
    Metric("fairway_residual_error_seconds", "gauge", "Mean absolute error of the predicted TTFT."),
    Metric("fairway_residual_bias_seconds", "gauge", "Mean of observed minus predicted TTFT."),
    Metric("fairway_explicit_error_seconds", "gauge", "Mean absolute error of the explicit terms alone."),
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

OUTCOMES = ("finished", "aborted", "rejected", "failed")
Reading = tuple[str, dict[str, str], float]
"""Name, labels, value."""

_TOTALS = {
    "fairway_decisions_unknown_length_total": "unknown_length",
    "fairway_prompt_tokens_total": "prompt_tokens",
    "fairway_predicted_hit_tokens_total": "hit_tokens",
    "fairway_observed_prompt_tokens_total": "observed_prompt_tokens",
    "fairway_observed_cached_tokens_total": "observed_cached_tokens",
    "fairway_moved_requests_total": "moved",
    "fairway_orphaned_reservations_total": "orphans",
    "fairway_lifecycle_batches_total": "batches",
    "fairway_lifecycle_batches_lost_total": "batches_lost",
    "fairway_lifecycle_batches_late_total": "batches_late",
    "fairway_replica_restarts_total": "restarts",
    "fairway_index_forgotten_blocks_total": "index_blocks_forgotten",
}
_KV_EVENTS = {
    "fairway_kv_event_batches_total": "batches",
    "fairway_kv_event_gaps_total": "gaps",
    "fairway_kv_event_resets_total": "resets",
    "fairway_kv_event_decode_errors_total": "decode_errors",
}
_REPLICA = {
    "fairway_replica_load_seconds": "load_s",
    "fairway_replica_open_requests": "num_open",
    "fairway_replica_indexed_blocks": "index_blocks",
}
_RESIDUAL = {
    "fairway_residual_samples": "samples",
    "fairway_residual_cold": "cold",
    "fairway_residual_error_seconds": "mae_s",
    "fairway_residual_bias_seconds": "bias_s",
    "fairway_explicit_error_seconds": "explicit_mae_s",
}


def counter_readings(snapshot: Mapping[str, Any]) -> Iterator[Reading]:
    """What the snapshot says was counted since its ingress started.

    Args:
        snapshot: `RoutingState.snapshot`, with the ingress' `untokenised` and `kv_events` where it has them.
    """
    totals = snapshot["totals"]
    yield "fairway_decisions_total", {"router": snapshot["router"]}, totals["decisions"]
    yield "fairway_residual_drifts_total", {}, snapshot["residual"]["drifts"]
    for name, field in _TOTALS.items():
        yield name, {}, totals[field]
    for outcome in OUTCOMES:
        yield "fairway_requests_total", {"outcome": outcome}, totals[outcome]
    for reason, count in snapshot.get("untokenised", {}).items():
        yield "fairway_untokenised_total", {"reason": reason}, count
    kv_events = snapshot.get("kv_events", {})
    for name, field in _KV_EVENTS.items():
        yield name, {}, kv_events.get(field, 0)


def gauge_readings(snapshot: Mapping[str, Any]) -> Iterator[Reading]:
    """What the snapshot says of this moment; `snapshot` as for `counter_readings`."""
    yield "fairway_weights_version", {}, snapshot["version"]
    for name, field in _RESIDUAL.items():
        yield name, {}, float(snapshot["residual"][field])
    for replica in snapshot["replicas"]:
        for name, field in _REPLICA.items():
            yield name, {"replica": replica["replica_id"]}, replica[field]


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
            snapshot: as for `counter_readings`.
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
            for name in _REPLICA:
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
