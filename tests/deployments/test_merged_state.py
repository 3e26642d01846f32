"""One view over several ingress replicas."""

from typing import Any

from serve_app.deployments.merged_state import DECISIONS_SHOWN, merged_state


def _snapshot(version: int, load_s: float, num_open: int, decided: list[float]) -> dict[str, Any]:
    return {
        "ingress": f"i{version}",
        "version": version,
        "router": "lbgr",
        "weights": {"miss": float(version)},
        "replicas": [{"replica_id": "r", "load_s": load_s, "num_open": num_open, "index_blocks": 5}],
        "decisions": [{"decided_at_s": at_s} for at_s in decided],
        "residual": {"samples": version},
    }


def test_replica_shows_the_highest_load_that_any_ingress_sees() -> None:
    merged = merged_state([_snapshot(1, 2.0, 1, []), _snapshot(1, 0.5, 3, [])])
    assert merged["replicas"] == [{"replica_id": "r", "load_s": 2.0, "num_open": 3, "index_blocks": 5}]


def test_decisions_are_newest_first_over_all_and_bounded() -> None:
    merged = merged_state([_snapshot(1, 0, 0, [3.0, 1.0]), _snapshot(1, 0, 0, [float(n) for n in range(100)])])
    times = [decision["decided_at_s"] for decision in merged["decisions"]]
    assert len(times) == DECISIONS_SHOWN
    assert times == sorted(times, reverse=True)
    assert times[0] == 99.0


def test_newest_document_is_shown_and_each_ingress_keeps_its_own() -> None:
    merged = merged_state([_snapshot(2, 0, 0, []), _snapshot(3, 0, 0, [])])
    assert (merged["version"], merged["weights"]) == (3, {"miss": 3.0})
    assert [one["version"] for one in merged["ingresses"]] == [2, 3]
    assert all("decisions" not in one for one in merged["ingresses"])


def test_replica_that_only_one_ingress_knows_is_shown() -> None:
    other = _snapshot(1, 1.0, 1, [])
    other["replicas"][0]["replica_id"] = "new"
    assert [r["replica_id"] for r in merged_state([_snapshot(1, 0, 0, []), other])["replicas"]] == ["new", "r"]
