"""The Grafana dashboard as code: `python -m serve_app.observability.grafana` writes configs/grafana/fairway.json.

Every panel reads names from `metrics` alone. Rates are over `$__rate_interval`, which Grafana keeps longer than four
scrapes. Several ingress replicas see the same engines, so a replica's load is the highest that any of them sees.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TARGET = Path("configs/grafana/fairway.json")
WIDTH, HEIGHT, COLUMNS = 8, 8, 3

DECISIONS = "sum by (router) (rate(ray_fairway_decisions_total[$__rate_interval]))"
OUTCOMES = "sum by (outcome) (rate(ray_fairway_requests_total[$__rate_interval]))"
UNTOKENISED = "sum by (reason) (rate(ray_fairway_untokenised_total[$__rate_interval]))"
LOAD = "max by (replica) (ray_fairway_replica_load_seconds)"
OPEN = "max by (replica) (ray_fairway_replica_open_requests)"
INDEXED = "max by (replica) (ray_fairway_replica_indexed_blocks)"
PREDICTED_HITS = (
    "sum(rate(ray_fairway_predicted_hit_tokens_total[$__rate_interval]))"
    " / sum(rate(ray_fairway_prompt_tokens_total[$__rate_interval]))"
)
OBSERVED_HITS = (
    "sum(rate(ray_fairway_observed_cached_tokens_total[$__rate_interval]))"
    " / sum(rate(ray_fairway_observed_prompt_tokens_total[$__rate_interval]))"
)
ENGINE_HITS = (
    "sum by (ReplicaId) (rate(ray_vllm_prefix_cache_hits_total[$__rate_interval]))"
    " / sum by (ReplicaId) (rate(ray_vllm_prefix_cache_queries_total[$__rate_interval]))"
)
ERROR = "avg(ray_fairway_residual_error_seconds)"
EXPLICIT_ERROR = "avg(ray_fairway_explicit_error_seconds)"
BIAS = "avg(ray_fairway_residual_bias_seconds)"
REPLICA_ERROR = "max by (replica) (ray_fairway_replica_error_seconds)"
REPLICA_COVERAGE = "max by (replica) (ray_fairway_replica_coverage_ratio) > 0"
COLD = "sum(ray_fairway_residual_cold)"
SAMPLES = "sum(ray_fairway_residual_samples)"
DRIFTS = "sum(increase(ray_fairway_residual_drifts_total[$__rate_interval]))"
GAPS = "sum(increase(ray_fairway_kv_event_gaps_total[$__rate_interval]))"
RESETS = "sum(increase(ray_fairway_kv_event_resets_total[$__rate_interval]))"
SILENCE = "max by (replica) (ray_fairway_kv_event_silence_seconds)"
LAG = "max by (replica) (ray_fairway_kv_event_lag_seconds)"
COLD_DECISIONS = "sum(rate(ray_fairway_decisions_cold_total[$__rate_interval]))"
STALE_DECISIONS = "sum(rate(ray_fairway_decisions_stale_view_total[$__rate_interval]))"
OVERLOADED_HOMES = "sum(rate(ray_fairway_decisions_home_overloaded_total[$__rate_interval]))"
EXPLORED = "sum(rate(ray_fairway_decisions_explored_total[$__rate_interval]))"
LOST_BATCHES = "sum(increase(ray_fairway_lifecycle_batches_lost_total[$__rate_interval]))"
ORPHANS = "sum(increase(ray_fairway_orphaned_reservations_total[$__rate_interval]))"
VERSION = "max(ray_fairway_weights_version)"
VERSION_SPREAD = "max(ray_fairway_weights_version) - min(ray_fairway_weights_version)"
RUNNING = "sum by (ReplicaId) (ray_vllm_num_requests_running)"
WAITING = "sum by (ReplicaId) (ray_vllm_num_requests_waiting)"
KV_USAGE = "max by (ReplicaId) (ray_vllm_kv_cache_usage_perc)"
PREEMPTIONS = "sum by (ReplicaId) (rate(ray_vllm_num_preemptions_total[$__rate_interval]))"
OUTPUT_TOKENS = "sum(rate(ray_vllm_generation_tokens_total[$__rate_interval]))"
ROUTING_FAILURES = "sum by (reason) (rate(ray_serve_haproxy_ingress_router_failures_total[$__rate_interval]))"
TARGET_REPLICAS = "sum by (deployment) (ray_serve_autoscaling_target_replicas)"
HEALTHY_REPLICAS = "sum by (deployment) (ray_serve_deployment_replica_healthy)"


@dataclass(frozen=True, slots=True)
class Panel:
    """One time series panel; queries are (PromQL, legend), `unit` is Grafana's name for it."""

    title: str
    unit: str
    meaning: str
    queries: tuple[tuple[str, str], ...]


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    """Median, 95th and 99th percentile over all series of an exported histogram."""
    rate = f"sum by (le) (rate(ray_{histogram}_bucket[$__rate_interval]))"
    shares = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    return tuple((f"histogram_quantile({share}, {rate})", legend) for share, legend in shares)


REPLICA, ENGINE = "{{replica}}", "{{ReplicaId}}"

ROWS: dict[str, tuple[Panel, ...]] = {
    "What users feel": (
        Panel("TTFT", "s", "Arrival at the engine to first token.", quantiles("vllm_time_to_first_token_seconds")),
        Panel("Request latency", "s", "Arrival at the engine to end.", quantiles("vllm_e2e_request_latency_seconds")),
        Panel("Time in the waiting queue", "s", "Before prefill.", quantiles("vllm_request_queue_time_seconds")),
        Panel("TPOT", "s", "Mean a request.", quantiles("vllm_request_time_per_output_token_seconds")),
        Panel("Requests by outcome", "reqps", "As the replicas report them.", ((OUTCOMES, "{{outcome}}"),)),
        Panel("Output tokens", "short", "Tokens a second, all replicas.", ((OUTPUT_TOKENS, "tokens/s"),)),
    ),
    "Which replica": (
        Panel("Decisions by rule", "reqps", "Routing decisions a second.", ((DECISIONS, "{{router}}"),)),
        Panel("Assigned work", "s", "Seconds of prefill assigned and left, by replica.", ((LOAD, REPLICA),)),
        Panel("Open requests", "short", "Open reservations, by replica.", ((OPEN, REPLICA),)),
        Panel(
            "Prefix hit rate",
            "percentunit",
            "Share of prompt tokens: as routing predicted, and as the engines found.",
            ((PREDICTED_HITS, "predicted"), (OBSERVED_HITS, "observed")),
        ),
        Panel("Hit rate by engine", "percentunit", "vLLM's own count of tokens.", ((ENGINE_HITS, ENGINE),)),
        Panel("Indexed KV blocks", "short", "KV blocks that routing credits, by replica.", ((INDEXED, REPLICA),)),
    ),
    "How good the predictions are": (
        Panel(
            "Error of predicted TTFT",
            "s",
            "Mean absolute error, with the learned correction and without it.",
            ((ERROR, "with correction"), (EXPLICIT_ERROR, "explicit terms alone")),
        ),
        Panel("Bias", "s", "Mean of observed minus predicted.", ((BIAS, "bias"),)),
        Panel("Error by replica", "s", "Mean absolute error of the predicted TTFT.", ((REPLICA_ERROR, REPLICA),)),
        Panel(
            "Interval coverage by replica",
            "percentunit",
            "Share of TTFTs within the interval that is meant to hold 90 %.",
            ((REPLICA_COVERAGE, REPLICA),),
        ),
        Panel(
            "Learner",
            "short",
            "Observations since the last fresh start, ingresses whose model is cold, fresh starts because of drift.",
            ((SAMPLES, "samples"), (COLD, "cold"), (DRIFTS, "drifts")),
        ),
        Panel("Weights version", "short", "A step marks a change.", ((VERSION, "newest"), (VERSION_SPREAD, "spread"))),
    ),
    "Engines": (
        Panel("Waiting requests", "short", "vLLM's waiting queue.", ((WAITING, ENGINE),)),
        Panel("Running requests", "short", "vLLM's running requests.", ((RUNNING, ENGINE),)),
        Panel("KV cache in use", "percentunit", "Share of KV blocks in use.", ((KV_USAGE, ENGINE),)),
        Panel("Preemptions", "short", "Preemptions a second.", ((PREEMPTIONS, ENGINE),)),
        Panel(
            "Replicas",
            "short",
            "What autoscaling aims at, and how many are healthy.",
            ((TARGET_REPLICAS, "target {{deployment}}"), (HEALTHY_REPLICAS, "healthy {{deployment}}")),
        ),
    ),
    "What goes wrong": (
        Panel("Routing time", "ms", "HAProxy's view.", quantiles("serve_haproxy_ingress_router_latency_ms")),
        Panel("Routing failures", "reqps", "By reason; most give a client a 503.", ((ROUTING_FAILURES, "{{reason}}"),)),
        Panel("Routed without token ids", "reqps", "By reason; these go by load.", ((UNTOKENISED, "{{reason}}"),)),
        Panel(
            "Events lost and healed",
            "short",
            "KV-event gaps and index resets, life-cycle batches lost, reservations released as orphans.",
            ((GAPS, "KV gaps"), (RESETS, "index resets"), (LOST_BATCHES, "batches lost"), (ORPHANS, "orphans")),
        ),
        Panel(
            "Guard rails",
            "reqps",
            "Decisions with a cold learner, with untrusted KV events, away from an overloaded home, and at random.",
            (
                (COLD_DECISIONS, "cold learner"),
                (STALE_DECISIONS, "stale view"),
                (OVERLOADED_HOMES, "home overloaded"),
                (EXPLORED, "explored"),
            ),
        ),
        Panel(
            "KV-event feeds",
            "s",
            "Time since each feed was heard, and how late its last batch came.",
            ((SILENCE, f"silence {REPLICA}"), (LAG, f"lag {REPLICA}")),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard, ready for JSON: rows from top to bottom, panels in reading order."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_row(title, y))
        panels += [_timeseries(one, i, y + 1) for i, one in enumerate(row)]
        y += 1 + HEIGHT * math.ceil(len(row) / COLUMNS)
    return {
        "uid": "fairway-serve",
        "title": "fairway-serve",
        "tags": ["fairway-serve", "ray", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data"}]},
        "panels": [{"id": number, **one} for number, one in enumerate(panels, start=1)],
    }


def as_json() -> str:
    """The committed file's text."""
    return json.dumps(dashboard(), indent=2) + "\n"


def _row(title: str, y: int) -> dict[str, Any]:
    return {
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": WIDTH * COLUMNS, "h": 1},
        "panels": [],
    }


def _timeseries(one: Panel, place: int, y: int) -> dict[str, Any]:
    grid = {"x": WIDTH * (place % COLUMNS), "y": y + HEIGHT * (place // COLUMNS), "w": WIDTH, "h": HEIGHT}
    return {
        "type": "timeseries",
        "title": one.title,
        "description": one.meaning,
        "datasource": DATASOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": one.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(one.queries)
        ],
    }


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(as_json())
    print(f"wrote {TARGET}")
