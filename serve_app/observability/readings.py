"""What one ingress' snapshot says for each of our metrics; pure, names are those of `metrics.METRICS`."""

from collections.abc import Iterator, Mapping
from typing import Any

OUTCOMES = ("finished", "aborted", "rejected", "failed")
FOLLOWED = "followed"
"""Label of the wishes that were followed, whose note is empty: Prometheus drops an empty label."""
Reading = tuple[str, dict[str, str], float]
"""Name, labels, value."""

_TOTALS = {
    "fairway_decisions_unknown_length_total": "unknown_length",
    "fairway_decisions_cold_total": "cold_learner",
    "fairway_decisions_stale_view_total": "stale_view",
    "fairway_decisions_home_overloaded_total": "homes_overloaded",
    "fairway_decisions_explored_total": "explored",
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
    "fairway_kv_event_batches_replayed_total": "replayed",
    "fairway_kv_event_batches_dead_total": "dead_batches",
    "fairway_kv_events_total": "events",
    "fairway_kv_event_gaps_total": "gaps",
    "fairway_kv_event_resets_total": "resets",
    "fairway_kv_event_restarts_total": "restarts",
    "fairway_kv_event_decode_errors_total": "decode_errors",
}
_REPLICA = {
    "fairway_replica_load_seconds": "load_s",
    "fairway_replica_open_requests": "num_open",
    "fairway_replica_indexed_blocks": "index_blocks",
    "fairway_replica_predictions": "predictions",
    "fairway_replica_error_seconds": "mae_s",
    "fairway_replica_bias_seconds": "bias_s",
    "fairway_replica_interval_seconds": "interval_s",
    "fairway_replica_coverage_ratio": "coverage",
}
_UNTRUSTED = "fairway_replica_events_untrusted"
_FEED = {"fairway_kv_event_silence_seconds": "silent_s", "fairway_kv_event_lag_seconds": "lag_s"}
_RESIDUAL = {
    "fairway_residual_samples": "samples",
    "fairway_residual_cold": "cold",
    "fairway_residual_error_seconds": "mae_s",
    "fairway_residual_bias_seconds": "bias_s",
    "fairway_residual_interval_seconds": "interval_s",
    "fairway_residual_coverage_ratio": "coverage",
    "fairway_explicit_error_seconds": "explicit_mae_s",
}
_INDEX = {
    "fairway_index_entries": "entries",
    "fairway_index_max_entries": "max_entries",
    "fairway_index_expected_entries": "expected",
    "fairway_index_bytes": "bytes",
}
REPLICA_GAUGES = (*_REPLICA, _UNTRUSTED, *_FEED)
"""Gauges that an ingress publishes of each replica."""


def counter_readings(snapshot: Mapping[str, Any]) -> Iterator[Reading]:
    """What the snapshot says was counted since its ingress started.

    Args:
        snapshot: `RoutingState.snapshot`, with the ingress' `untokenised`, `wishes`, `kv_events` and `feeds` where it
            has them.
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
    for note, count in snapshot.get("wishes", {}).items():
        yield "fairway_wishes_total", {"note": note or FOLLOWED}, count
    kv_events = snapshot.get("kv_events", {})
    for name, field in _KV_EVENTS.items():
        yield name, {}, kv_events.get(field, 0)


def gauge_readings(snapshot: Mapping[str, Any]) -> Iterator[Reading]:
    """What the snapshot says of this moment, unknown figures left out; `snapshot` as for `counter_readings`."""
    yield "fairway_weights_version", {}, snapshot["version"]
    yield "fairway_pressure_requests", {}, snapshot["pressure"]
    for name, field in _RESIDUAL.items():
        yield name, {}, float(snapshot["residual"][field])
    for name, field in _INDEX.items():
        yield name, {}, snapshot["index"][field]
    for replica in snapshot["replicas"]:
        labels = {"replica": replica["replica_id"]}
        for name, field in _REPLICA.items():
            yield name, labels, replica[field]
        yield _UNTRUSTED, labels, float(not replica["events_trusted"])
    for replica_id, feed in snapshot.get("feeds", {}).items():
        for name, field in _FEED.items():
            if feed[field] is not None:
                yield name, {"replica": replica_id}, feed[field]
