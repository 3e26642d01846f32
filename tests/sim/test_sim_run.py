"""Whole simulations: by hand where they are small, by their laws where they are not."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from serve_app.emulation.settings import EmulationSettings
from serve_app.sim.arrivals import Arrival, FloodParams, GspParams, flood, gsp
from serve_app.sim.engine import EngineParams
from serve_app.sim.metrics import Row
from serve_app.sim.run import BASELINE, Policies, Simulation, simulate, simulate_gsp

DEVICE = EmulationSettings(step_base_s=0.01, s_per_token=1e-3, kv_blocks=200)
PARAMS = EngineParams(DEVICE, block_size_tokens=16, max_step_tokens=100, max_running=64)
SMALL_GSP = GspParams(num_groups=8, prompts_per_group=6, prompt_tokens=(128, 256, 512), rate_per_s=6.0)


def arrival(request_id: str, at_s: float, tokens: list[int], output_tokens: int = 1) -> Arrival:
    return Arrival(at_s, request_id, np.array(tokens, dtype=np.int32), output_tokens, "all")


def small_gsp(seed: int = 0) -> list[Arrival]:
    return gsp(SMALL_GSP, np.random.default_rng(seed))


def times(simulation: Simulation) -> dict[str, tuple[float, float]]:
    return {one.request_id: (round(one.ttft_s, 9), round(one.latency_s, 9)) for one in simulation.served}


def test_one_cold_request_takes_its_chunks_and_its_decodes() -> None:
    simulation = Simulation(PARAMS, 1, Policies(), seed=0)
    simulation.run([arrival("one", 5.0, list(range(250)), output_tokens=3)])
    # Chunks of 100, 100 and 50 tokens, then two decodes of one token, each step 10 ms more.
    assert times(simulation) == {"one": (0.28, 0.302)}


def test_second_request_pays_only_for_what_the_first_left_uncached() -> None:
    simulation = Simulation(PARAMS, 1, Policies(), seed=0)
    tokens = list(range(250))
    simulation.run([arrival("cold", 0.0, tokens), arrival("warm", 1.0, tokens)])
    # 15 full blocks of 16 tokens are cached, 10 tokens are computed.
    assert times(simulation) == {"cold": (0.28, 0.28), "warm": (0.02, 0.02)}
    assert [one.cached_tokens for one in simulation.served] == [0, 240]


@pytest.mark.parametrize(("ordering", "first"), [("fcfs", "miss"), ("lpm", "hit"), ("fairway", "hit")])
def test_waiting_requests_start_in_the_order_of_the_chosen_policy(ordering: str, first: str) -> None:
    simulation = Simulation(PARAMS, 1, Policies("round-robin", ordering, "lru"), seed=0)
    shared = list(range(160))
    simulation.run(
        [
            arrival("lead", 0.0, shared),
            # Fills the first step after 1 s alone, so that the other two meet in the waiting queue.
            arrival("busy", 1.0, list(range(5_000, 5_100))),
            arrival("miss", 1.01, list(range(6_000, 6_200))),
            arrival("hit", 1.02, [*shared, *range(7_000, 7_020)]),
        ]
    )
    order = [one.request_id for one in simulation.served]
    assert next(name for name in order if name in ("miss", "hit")) == first


def test_router_sends_a_prefix_back_to_where_it_is_cached() -> None:
    simulation = Simulation(PARAMS, 4, Policies(), seed=3)
    shared = list(range(320))
    simulation.run([arrival(str(n), float(n), [*shared, 9_000 + n]) for n in range(5)])
    assert len({one.replica_id for one in simulation.served}) == 1
    assert [one.cached_tokens for one in simulation.served] == [0, 320, 320, 320, 320]


@pytest.mark.parametrize("policies", [BASELINE, Policies(), Policies("power-of-two", "lpm", "rlt")])
def test_every_request_is_served_once_and_nothing_is_left_behind(policies: Policies) -> None:
    arrivals = small_gsp()
    simulation = Simulation(PARAMS, 3, policies, seed=1)
    simulation.run(arrivals)
    assert sorted(one.request_id for one in simulation.served) == sorted(one.request_id for one in arrivals)
    assert simulation.routing.ledger.num_reserved == simulation.routing.ledger.num_released == len(arrivals)
    simulation.routing.check_integrity(simulation.clock.now_s)
    for replica_id, replica in simulation.replicas.items():
        pool = replica.scheduler.kv_cache_manager.block_pool
        assert not replica.scheduler.requests
        assert pool.get_num_free_blocks() == DEVICE.kv_blocks - 1
        assert simulation.routing.index.num_blocks(replica_id) == len(pool.cached_block_hash_to_block)


def test_index_follows_when_an_engine_drops_its_prefix_cache() -> None:
    simulation = Simulation(PARAMS, 1, Policies(), seed=0)
    simulation.run([arrival("before", 0.0, list(range(250)))])
    (replica,) = simulation.replicas.values()
    assert replica.scheduler.reset_prefix_cache()
    simulation.run([arrival("after", 1.0, list(range(250, 300)))])
    assert simulation.routing.index.num_blocks("replica-0") == 50 // PARAMS.block_size_tokens
    assert simulation.served[1].cached_tokens == 0


def test_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    def run(seed: int) -> bytes:
        return json.dumps(simulate(small_gsp(seed), Policies(), 3, seed, PARAMS)).encode()

    first, again, other = run(11), run(11), run(12)
    assert first == again
    assert first != other


def test_no_wall_clock_is_read_by_the_simulated_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(PARAMS, 2, Policies(), seed=0)
    arrivals = small_gsp()
    callers = set()

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(time, name)

        def read(*args: Any) -> Any:
            callers.add(f"{sys._getframe(1).f_globals['__name__']} calls time.{name}")
            return original(*args)

        return read

    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"):
        monkeypatch.setattr(time, name, watched(name))
    time.time()
    simulation.run(arrivals)
    monkeypatch.undo()
    # The call above shows that reads are seen; logging stamps its records and may be there too.
    assert f"{__name__} calls time.time" in callers
    assert {caller for caller in callers if not caller.startswith((__name__, "logging"))} == set()


def test_requests_arrive_in_the_engine_at_the_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(PARAMS, 1, Policies(), seed=0)
    scheduler = next(iter(simulation.replicas.values())).scheduler
    seen: list[tuple[float, float]] = []
    add_request = scheduler.add_request

    def watched(request: Any) -> None:
        seen.append((request.arrival_time, scheduler._now_s()))
        add_request(request)

    monkeypatch.setattr(scheduler, "add_request", watched)
    simulation.run([arrival("a", 1.25, [1, 2, 3]), arrival("b", 2.5, [4, 5, 6])])
    assert seen == [(1.25, 1.25), (2.5, 2.5)]


def test_request_longer_than_the_pool_is_refused_with_both_lengths() -> None:
    simulation = Simulation(PARAMS, 1, Policies(), seed=0)
    longest = (DEVICE.kv_blocks - 1) * PARAMS.block_size_tokens
    with pytest.raises(ValueError, match=f"needs {longest + 1} tokens.*{longest}"):
        simulation.run([arrival("too long", 0.0, [1] * (longest - 4), output_tokens=5)])
    simulation = Simulation(PARAMS, 1, Policies(), seed=0)
    assert len(simulation.run([arrival("just fits", 0.0, [1] * (longest - 5), output_tokens=5)])) == 1


def test_flood_reports_its_phases() -> None:
    workload = FloodParams(
        num_misses=4, miss_tokens=300, hit_prefix_tokens=320, hit_tokens=16, rate_per_s=4.0, duration_s=5.0, lead_s=1.0
    )
    rows = simulate(flood(workload, np.random.default_rng(0)), Policies(), 1, 0, PARAMS)
    assert [row["phase"] for row in rows] == ["lead", "miss", "hit"]
    assert rows[2]["hit_rate"] > 0.9


def test_gsp_rows_name_their_policies_and_compare_on_the_same_arrivals() -> None:
    done: list[tuple[int, int]] = []
    rows = simulate_gsp(
        replicas=2, rate_per_s=8.0, groups=4, prompts_per_group=4, progress=lambda now, total: done.append((now, total))
    )
    names = [(row["scenario"], row["router"], row["ordering"], row["eviction"], row.get("default")) for row in rows]
    assert names == [
        ("gsp-8", "round-robin", "fcfs", "lru", None),
        ("gsp-8", "lbgr", "fairway", "rlt", True),
    ]
    assert {row["requests"] for row in rows} == {16}
    assert done[:16] == [(now, 16) for now in range(1, 17)]


def test_gsp_runs_the_baseline_once_when_it_is_what_was_asked_for() -> None:
    rows = simulate_gsp(2, 8.0, 0, "round-robin", "fcfs", "lru", groups=2, prompts_per_group=2)
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate_gsp(device="H100"), "device is 'H100'"),
        (lambda: simulate_gsp(replicas=0), "num_replicas is 0"),
        (lambda: simulate_gsp(router="random", groups=1), "router"),
        (lambda: simulate_gsp(ordering="sjf", groups=1), "ordering"),
        (lambda: simulate_gsp(rate_per_s=0.0), "rate_per_s is 0"),
    ],
)
def test_bad_parameter_is_named(call: Callable[[], list[Row]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
