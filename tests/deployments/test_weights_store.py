"""The routing document's history: durable, versioned, one winner a race."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from serve_app.config import RoutingWeights
from serve_app.deployments.weights_store import LostRace, WeightsStore


def test_fresh_store_has_no_document(tmp_path: Path) -> None:
    assert WeightsStore(tmp_path / "weights.sqlite3").latest() is None


def test_saved_document_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "weights.sqlite3"
    saved = WeightsStore(path).save("round-robin", RoutingWeights(queue=2.0), 1, now_s=5.0)
    assert saved.version == 2
    assert WeightsStore(path).latest() == saved


def test_stale_version_loses_and_changes_nothing(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "weights.sqlite3")
    first = store.save("lbgr", RoutingWeights(), 1, now_s=0.0)
    with pytest.raises(LostRace, match="version 1 was read, but version 2 is in force"):
        store.save("round-robin", RoutingWeights(), 1, now_s=1.0)
    assert store.latest() == first


def test_of_many_writers_at_once_exactly_one_wins(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "weights.sqlite3")

    def write(number: int) -> bool:
        try:
            store.save("lbgr", RoutingWeights(miss=float(number)), 1, now_s=0.0)
        except LostRace:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(16))) == 1


def test_unknown_router_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "weights.sqlite3")
    with pytest.raises(ValidationError, match="router"):
        store.save("nearest", RoutingWeights(), 1, now_s=0.0)
    assert store.latest() is None
