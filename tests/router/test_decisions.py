"""The ring of explained decisions: bounded, by request id, ready for JSON."""

import json

import pytest

from serve_app.router.choice import CandidateTerms
from serve_app.router.decisions import Decision, DecisionRing, Observed, Record, RouteRequest


def record(request_id: str, replica_id: str = "a") -> Record:
    terms = CandidateTerms(replica_id, 16, 0.1, 0.0, 0.2, 0.0, -0.1, 0.2, 0.2)
    decision = Decision(request_id, replica_id, "lbgr", 3, 40, 16, 0.2, 0.1, 12.5, (terms,))
    return Record(decision, {"miss_tokens": 24.0}, 0.3, teaches=True)


def test_ring_keeps_the_newest_and_finds_them_by_request_id() -> None:
    ring = DecisionRing(capacity=3)
    records = [record(f"{i}") for i in range(5)]
    for one in records:
        ring.keep(one)
    assert len(ring) == 3
    assert [one.decision.request_id for one in ring.newest(2)] == ["4", "3"]
    assert [one.decision.request_id for one in ring.newest(9)] == ["4", "3", "2"]
    assert ring.get("2") is records[2]
    assert ring.get("1") is None


def test_second_decision_for_a_request_replaces_the_first() -> None:
    ring = DecisionRing(capacity=3)
    for one in (record("r", "a"), record("s"), record("r", "b")):
        ring.keep(one)
    assert [(one.decision.request_id, one.decision.replica_id) for one in ring.newest(9)] == [("r", "b"), ("s", "a")]


def test_row_holds_every_field_and_is_ready_for_json() -> None:
    one = record("r")
    one.observed = Observed(ttft_s=0.25, cached_tokens=16, e2e_s=1.0, status=200)
    row = one.as_row()
    assert json.loads(json.dumps(row)) == row
    assert row["candidates"][0]["residual_s"] == -0.1
    assert row["observed"] == {"ttft_s": 0.25, "cached_tokens": 16, "e2e_s": 1.0, "status": 200}
    assert row["weights_version"] == 3


def test_impossible_request_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_tokens must be at least 0, got -1"):
        RouteRequest("r", -1)
    with pytest.raises(ValueError, match="num_prompts must be at least 1, got 0"):
        RouteRequest("r", 1, (), 0)
