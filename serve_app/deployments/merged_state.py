"""What several ingress replicas know, as one view."""

from typing import Any

DECISIONS_SHOWN = 50


def merged_state(snapshots: list[dict[str, Any]]) -> dict[str, Any]:
    """One view over all ingress replicas: per replica the highest load anyone sees, newest decision first."""
    replicas: dict[str, dict[str, Any]] = {}
    for snapshot in snapshots:
        for seen in snapshot["replicas"]:
            known = replicas.setdefault(seen["replica_id"], dict(seen))
            for figure in ("load_s", "num_open", "index_blocks"):
                known[figure] = max(known[figure], seen[figure])
    decisions = [decision for snapshot in snapshots for decision in snapshot["decisions"]]
    decisions.sort(key=lambda decision: float(decision["decided_at_s"]), reverse=True)
    newest = max(snapshots, key=lambda snapshot: int(snapshot["version"]))
    return {
        **{key: newest[key] for key in ("version", "router", "weights")},
        "replicas": [replicas[replica_id] for replica_id in sorted(replicas)],
        "decisions": decisions[:DECISIONS_SHOWN],
        "ingresses": [{k: v for k, v in snapshot.items() if k != "decisions"} for snapshot in snapshots],
    }
