"""What several ingress replicas know, as one view."""

from dataclasses import fields
from typing import Any

from serve_app.router.prediction_errors import PredictionErrors

DECISIONS_SHOWN = 50
_HIGHEST = ("load_s", "num_open", "index_blocks")
_ERRORS = tuple(field.name for field in fields(PredictionErrors))


def merged_state(snapshots: list[dict[str, Any]]) -> dict[str, Any]:
    """One view over all ingress replicas, newest decision first.

    Of a replica: the highest load that anyone sees, the errors of whoever scored the most predictions, and trust in its
    KV events only where all trust them.
    """
    replicas: dict[str, dict[str, Any]] = {}
    for snapshot in snapshots:
        for seen in snapshot["replicas"]:
            known = replicas.setdefault(seen["replica_id"], dict(seen))
            _merge(known, seen)
    decisions = [decision for snapshot in snapshots for decision in snapshot["decisions"]]
    decisions.sort(key=lambda decision: float(decision["decided_at_s"]), reverse=True)
    newest = max(snapshots, key=lambda snapshot: int(snapshot["version"]))
    return {
        **{key: newest[key] for key in ("version", "router", "weights")},
        "replicas": [replicas[replica_id] for replica_id in sorted(replicas)],
        "decisions": decisions[:DECISIONS_SHOWN],
        "ingresses": [{k: v for k, v in snapshot.items() if k != "decisions"} for snapshot in snapshots],
    }


def _merge(known: dict[str, Any], seen: dict[str, Any]) -> None:
    """Take into `known` what another ingress says of the replica; one of an older version says less of it."""
    for figure in _HIGHEST:
        known[figure] = max(known[figure], seen[figure])
    if not seen.get("events_trusted", True):
        known["events_trusted"] = False
    if seen.get("predictions", 0) > known.get("predictions", 0):
        known.update({name: seen[name] for name in _ERRORS})
