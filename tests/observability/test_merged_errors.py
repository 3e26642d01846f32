"""What one view over several ingresses says of a replica's prediction errors and of trust in its KV events."""

from dataclasses import asdict
from typing import Any

from serve_app.deployments.merged_state import merged_state
from serve_app.router.prediction_errors import PredictionErrors
from tests.observability.routed import ingress_snapshot, routed_state


def test_errors_are_those_of_the_ingress_with_the_most_predictions() -> None:
    few, many = PredictionErrors(3, 9.0, 9.0, 9.0, 0.1), PredictionErrors(40, 0.2, -0.1, 0.5, 0.9)
    for snapshots in ([_snapshot(few), _snapshot(many)], [_snapshot(many), _snapshot(few)]):
        (merged,) = merged_state(snapshots)["replicas"]
        assert {name: merged[name] for name in asdict(many)} == asdict(many)


def test_events_are_trusted_only_where_every_ingress_trusts_them() -> None:
    trusting, doubting = _snapshot(events_trusted=True), _snapshot(events_trusted=False)
    merged = [
        merged_state(snapshots)["replicas"][0]["events_trusted"]
        for snapshots in ([trusting], [trusting, trusting], [trusting, doubting], [doubting, trusting])
    ]
    assert merged == [True, True, False, False]


def test_merging_changes_no_snapshot() -> None:
    first, second = _snapshot(PredictionErrors(1, 0.1)), _snapshot(PredictionErrors(2, 0.2), events_trusted=False)
    merged_state([first, second])
    assert first["replicas"][0]["predictions"] == 1
    assert first["replicas"][0]["events_trusted"]


def _snapshot(errors: PredictionErrors | None = None, **changed: Any) -> dict[str, Any]:
    """Of an ingress that knows one replica."""
    snapshot = ingress_snapshot(routed_state(replica_ids=("a",)))
    snapshot["replicas"][0].update(asdict(errors or PredictionErrors()), **changed)
    return snapshot
