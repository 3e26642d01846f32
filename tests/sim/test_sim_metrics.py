"""Rows against values worked out by hand."""

import pytest

from serve_app.sim.metrics import Served, load_max_over_mean, phase_rows


def served(number: int, replica_id: str = "a", phase: str = "all", ttft_s: float = 0.0, cached: int = 0) -> Served:
    return Served(str(number), replica_id, phase, float(number), ttft_s, 2 * ttft_s, 100, cached)


def test_row_matches_a_calculation_by_hand() -> None:
    rows = phase_rows(
        [served(n, "a" if n < 60 else "b", ttft_s=n / 100, cached=50 * (n % 2)) for n in range(101)], num_replicas=4
    )
    assert rows == [
        {
            "phase": "all",
            "requests": 101,
            "ttft_p50_s": pytest.approx(0.50),
            "ttft_p95_s": pytest.approx(0.95),
            "ttft_p99_s": pytest.approx(0.99),
            "ttft_max_s": pytest.approx(1.0),
            "latency_p50_s": pytest.approx(1.00),
            "latency_p95_s": pytest.approx(1.90),
            "latency_p99_s": pytest.approx(1.98),
            "hit_rate": pytest.approx(50 * 50 / 10_100),
            "load_max_over_mean": pytest.approx(60 / (101 / 4)),
        }
    ]


def test_a_request_belongs_to_the_phase_of_its_arrival_and_phases_keep_their_order() -> None:
    finished = [served(3, phase="hit", ttft_s=1.0), served(0, phase="lead"), served(1, phase="miss", ttft_s=9.0)]
    rows = phase_rows(finished, 1)
    assert [(row["phase"], row["requests"], row["ttft_max_s"]) for row in rows] == [
        ("lead", 1, 0.0),
        ("miss", 1, 9.0),
        ("hit", 1, 1.0),
    ]


def test_load_share_is_one_when_even_and_the_number_of_replicas_when_one_does_all() -> None:
    assert load_max_over_mean(["a", "b", "c", "a", "b", "c"], 3) == 1.0
    assert load_max_over_mean(["a"] * 5, 3) == 3.0


def test_nothing_served_has_no_rows() -> None:
    assert phase_rows([], 2) == []
