"""Rows against values worked out by hand, and against a slow reference."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import quantiles

import pytest

from serve_app.sim.columns import Served, columns
from serve_app.sim.metrics import Row, load_max_over_mean, phase_rows, starvation, starved, with_starvation


def served(number: int, replica_id: str = "a", phase: str = "all", ttft_s: float = 0.0, cached: int = 0) -> Served:
    return Served(str(number), replica_id, phase, float(number), ttft_s, 2 * ttft_s, 100, cached)


def random_run(seed: int, size: int = 200) -> list[Served]:
    rng = random.Random(seed)
    return [
        Served(
            request_id=f"r{number}",
            replica_id=f"replica-{rng.randrange(3)}",
            phase=("calm", "burst", "spike")[3 * number // size],
            arrival_s=number + rng.random(),
            ttft_s=(ttft_s := rng.expovariate(1.0)),
            latency_s=ttft_s + rng.random(),
            prompt_tokens=rng.randrange(100, 200),
            cached_tokens=rng.randrange(100),
            output_tokens=rng.choice([1, 1, 5, 9]),
        )
        for number in rng.sample(range(size), size)
    ]


def slow_row(phase: str, run: Sequence[Served], num_replicas: int) -> Row:
    """As the module's docstring says, one request at a time."""

    def cut(values: Sequence[float], percentile: int) -> float:
        return quantiles(values, n=100, method="inclusive")[percentile - 1]

    ttfts_s, latencies_s = [one.ttft_s for one in run], [one.latency_s for one in run]
    tpots_s = [(one.latency_s - one.ttft_s) / (one.output_tokens - 1) for one in run if one.output_tokens > 1]
    return {
        "phase": phase,
        "requests": len(run),
        **{f"ttft_p{p}_s": pytest.approx(cut(ttfts_s, p)) for p in (50, 95, 99)},
        "ttft_max_s": max(ttfts_s),
        **{f"latency_p{p}_s": pytest.approx(cut(latencies_s, p)) for p in (50, 95, 99)},
        **{f"tpot_p{p}_s": pytest.approx(cut(tpots_s, p)) for p in (50, 99)},
        "hit_rate": pytest.approx(sum(one.cached_tokens for one in run) / sum(one.prompt_tokens for one in run)),
        "load_max_over_mean": pytest.approx(
            max(Counter(one.replica_id for one in run).values()) * num_replicas / len(run)
        ),
    }


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


@pytest.mark.parametrize("seed", range(5))
def test_rows_from_requests_and_from_columns_are_those_of_a_slow_reference(seed: int) -> None:
    run = random_run(seed)
    phases = ("calm", "burst", "spike")
    expected = [slow_row(phase, [one for one in run if one.phase == phase], 3) for phase in phases]
    expected.append(slow_row("all", run, 3))
    assert phase_rows(run, 3) == expected
    assert phase_rows(columns(run), 3) == phase_rows(run, 3)


def test_a_request_belongs_to_the_phase_of_its_arrival_and_phases_keep_their_order() -> None:
    finished = [served(3, phase="hit", ttft_s=1.0), served(0, phase="lead"), served(1, phase="miss", ttft_s=9.0)]
    rows = phase_rows(finished, 1)
    assert [(row["phase"], row["requests"], row["ttft_max_s"]) for row in rows] == [
        ("lead", 1, 0.0),
        ("miss", 1, 9.0),
        ("hit", 1, 1.0),
        ("all", 3, 9.0),
    ]


def test_a_phase_cannot_have_the_name_of_the_row_over_all_phases() -> None:
    with pytest.raises(ValueError, match="phase is 'all'"):
        phase_rows([served(0), served(1, phase="spike")], 1)


def test_time_per_output_token_leaves_out_requests_of_one_token() -> None:
    one, three = served(0, ttft_s=1.0), replace(served(1, ttft_s=1.0), latency_s=1.5, output_tokens=3)
    (row,) = phase_rows([one, three], 1)
    assert (row["tpot_p50_s"], row["tpot_p99_s"]) == (pytest.approx(0.25), pytest.approx(0.25))
    (without,) = phase_rows([one], 1)
    assert not [name for name in without if name.startswith("tpot")]


def test_load_share_is_one_when_even_and_the_number_of_replicas_when_one_does_all() -> None:
    assert load_max_over_mean(["a", "b", "c", "a", "b", "c"], 3) == 1.0
    assert load_max_over_mean(["a"] * 5, 3) == 3.0


def test_nothing_served_has_no_rows() -> None:
    assert phase_rows([], 2) == []
    assert with_starvation([], [], None) == []


def test_starved_is_above_the_limit_not_at_it() -> None:
    assert starved([1.0, 3.0, 3.1], 3.0) == 1
    assert starved([], 3.0) == 0


def test_a_policy_that_starves_many_escapes_its_own_rule_and_not_that_of_fcfs() -> None:
    run = [served(number, ttft_s=100.0 if number % 10 == 0 else 1.0) for number in range(200)]
    assert starvation(run, fcfs_p99_s=5.0) == {"starved": 20, "starved_own": 0}
    assert starvation(run[1:10] * 20 + run[:1], None) == {"starved": None, "starved_own": 1}


def test_starvation_is_judged_by_the_row_of_fcfs_of_the_same_phase() -> None:
    run = [served(number, phase="calm" if number < 10 else "spike", ttft_s=4.0) for number in range(20)]
    fcfs = [{"phase": "calm", "ttft_p99_s": 1.0}, {"phase": "spike", "ttft_p99_s": 2.0}]
    fcfs.append({"phase": "all", "ttft_p99_s": 4 / 3.5})
    rows = with_starvation(phase_rows(run, 1), run, fcfs)
    assert [(row["phase"], row["starved"], row["starved_own"]) for row in rows] == [
        ("calm", 10, 0),
        ("spike", 0, 0),
        ("all", 20, 0),
    ]
    assert [row["starved"] for row in with_starvation(phase_rows(run, 1), run, None)] == [None, None, None]
    with pytest.raises(ValueError, match=r"lack the phases \['all', 'spike'\]"):
        with_starvation(phase_rows(run, 1), run, fcfs[:1])
