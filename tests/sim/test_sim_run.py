"""Whole simulations: by hand where they are small, by their laws where they are not."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from serve_app.emulation.settings import EmulationSettings
from serve_app.router.block_hashes import BlockHasher
from serve_app.sim.arrivals import Arrival, FloodParams, GspParams, flood, gsp
from serve_app.sim.chosen import BASELINE, Policies
from serve_app.sim.engine import EngineParams
from serve_app.sim.metrics import phase_rows
from serve_app.sim.network import Fault, Network
from serve_app.sim.prompts import HashedPrompts
from serve_app.sim.run import Cluster, Simulation

DEVICE = EmulationSettings(step_base_s=0.01, s_per_token=1e-3, kv_blocks=200)
PARAMS = EngineParams(DEVICE, block_size_tokens=16, max_step_tokens=100, max_running=64)
SMALL_GSP = GspParams(num_groups=8, prompts_per_group=6, prompt_tokens=(128, 256, 512), rate_per_s=6.0)


ONE, TWO, THREE, FOUR = (Cluster(PARAMS, num_replicas) for num_replicas in (1, 2, 3, 4))


def arrival(request_id: str, at_s: float, tokens: list[int], output_tokens: int = 1) -> Arrival:
    return Arrival(at_s, request_id, np.array(tokens, dtype=np.int32), output_tokens, "all")


def small_gsp(seed: int = 0) -> list[Arrival]:
    return gsp(SMALL_GSP, np.random.default_rng(seed))


def times(simulation: Simulation) -> dict[str, tuple[float, float]]:
    return {one.request_id: (round(one.ttft_s, 9), round(one.latency_s, 9)) for one in simulation.served}


def run_of(
    cluster: Cluster, policies: Policies, arrivals: list[Arrival], prompts: HashedPrompts | None = None
) -> Simulation:
    simulation = Simulation(cluster, policies, 0, prompts)
    simulation.run(arrivals)
    return simulation


def test_one_cold_request_takes_its_chunks_and_its_decodes() -> None:
    simulation = Simulation(ONE, Policies(), seed=0)
    simulation.run([arrival("one", 5.0, list(range(250)), output_tokens=3)])
    # Chunks of 100, 100 and 50 tokens, then two decodes of one token, each step 10 ms more.
    assert times(simulation) == {"one": (0.28, 0.302)}


def test_second_request_pays_only_for_what_the_first_left_uncached() -> None:
    simulation = Simulation(ONE, Policies(), seed=0)
    tokens = list(range(250))
    simulation.run([arrival("cold", 0.0, tokens), arrival("warm", 1.0, tokens)])
    # 15 full blocks of 16 tokens are cached, 10 tokens are computed.
    assert times(simulation) == {"cold": (0.28, 0.28), "warm": (0.02, 0.02)}
    assert [one.cached_tokens for one in simulation.served] == [0, 240]


@pytest.mark.parametrize(("ordering", "first"), [("fcfs", "miss"), ("lpm", "hit"), ("fairway", "hit")])
def test_waiting_requests_start_in_the_order_of_the_chosen_policy(ordering: str, first: str) -> None:
    simulation = Simulation(ONE, Policies("round-robin", ordering, "lru"), seed=0)
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
    simulation = Simulation(FOUR, Policies(), seed=3)
    shared = list(range(320))
    simulation.run([arrival(str(n), float(n), [*shared, 9_000 + n]) for n in range(5)])
    assert len({one.replica_id for one in simulation.served}) == 1
    assert [one.cached_tokens for one in simulation.served] == [0, 320, 320, 320, 320]


@pytest.mark.parametrize("policies", [BASELINE, Policies(), Policies("power-of-two", "lpm", "rlt")])
def test_every_request_is_served_once_and_nothing_is_left_behind(policies: Policies) -> None:
    arrivals = small_gsp()
    simulation = Simulation(THREE, policies, seed=1)
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
    simulation = Simulation(ONE, Policies(), seed=0)
    simulation.run([arrival("before", 0.0, list(range(250)))])
    (replica,) = simulation.replicas.values()
    assert replica.scheduler.reset_prefix_cache()
    simulation.run([arrival("after", 1.0, list(range(250, 300)))])
    assert simulation.routing.index.num_blocks("replica-0") == 50 // PARAMS.block_size_tokens
    assert simulation.served[1].cached_tokens == 0


def test_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    def run(seed: int) -> bytes:
        return json.dumps(phase_rows(Simulation(THREE, Policies(), seed).run(small_gsp(seed)), 3)).encode()

    first, again, other = run(11), run(11), run(12)
    assert first == again
    assert first != other


def test_no_wall_clock_is_read_by_the_simulated_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(TWO, Policies(), seed=0)
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
    simulation = Simulation(ONE, Policies(), seed=0)
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
    simulation = Simulation(ONE, Policies(), seed=0)
    longest = (DEVICE.kv_blocks - 1) * PARAMS.block_size_tokens
    with pytest.raises(ValueError, match=f"needs {longest + 1} tokens.*{longest}"):
        simulation.run([arrival("too long", 0.0, [1] * (longest - 4), output_tokens=5)])
    simulation = Simulation(ONE, Policies(), seed=0)
    assert len(simulation.run([arrival("just fits", 0.0, [1] * (longest - 5), output_tokens=5)])) == 1


def test_flood_reports_its_phases() -> None:
    workload = FloodParams(
        num_misses=4, miss_tokens=300, hit_prefix_tokens=320, hit_tokens=16, rate_per_s=4.0, duration_s=5.0, lead_s=1.0
    )
    rows = phase_rows(Simulation(ONE, Policies(), 0).run(flood(workload, np.random.default_rng(0))), 1)
    assert [row["phase"] for row in rows] == ["lead", "miss", "hit", "all"]
    assert rows[2]["hit_rate"] > 0.9


def test_progress_counts_the_requests_that_finished() -> None:
    done: list[tuple[int, int]] = []
    Simulation(TWO, Policies(), 0).run(small_gsp(), lambda now, total: done.append((now, total)))
    assert done == [(now, 48) for now in range(1, 49)]


def test_runs_that_share_their_prompts_hashes_give_what_they_give_alone() -> None:
    arrivals, prompts = small_gsp(), HashedPrompts(PARAMS.block_size_tokens)
    alone = [times(run_of(THREE, policies, arrivals)) for policies in (BASELINE, Policies())]
    shared = [times(run_of(THREE, policies, arrivals, prompts)) for policies in (BASELINE, Policies())]
    assert shared == alone
    token_ids = arrivals[0].prompt.tolist()
    assert prompts.of(arrivals[0], token_ids).keys == BlockHasher(PARAMS.block_size_tokens).hashes(token_ids)


def test_output_that_fills_a_block_is_hashed_behind_the_known_prompt() -> None:
    for prompt_tokens in (10, 40):
        simulation = Simulation(ONE, Policies(), seed=0)
        simulation.run([arrival("one", 0.0, list(range(prompt_tokens)), output_tokens=30)])
        # The last token is sampled but never computed.
        assert simulation.routing.index.num_blocks("replica-0") == (prompt_tokens + 29) // PARAMS.block_size_tokens


def test_engines_without_kv_events_decide_the_same_on_one_replica() -> None:
    arrivals = small_gsp()
    silent = Cluster(PARAMS, 1, kv_events=False)
    assert times(run_of(silent, Policies(), arrivals)) == times(run_of(ONE, Policies(), arrivals))


def test_late_kv_events_do_not_hide_what_the_router_itself_sent_where() -> None:
    shared = list(range(320))
    late = Cluster(PARAMS, 4, network=Network(kv_event_delay_s=2.5))
    simulation = run_of(late, Policies(), [arrival(str(n), float(n), [*shared, 9_000 + n]) for n in range(6)])
    decisions = [simulation.routing.decisions.get(str(n)) for n in range(6)]
    assert [one.decision.hit_tokens for one in decisions if one is not None] == [0, *[320] * 5]
    assert [one.cached_tokens for one in simulation.served] == [0, *[320] * 5]
    assert len({one.replica_id for one in simulation.served}) == 1


def test_lost_kv_events_are_counted_and_give_no_credit() -> None:
    simulation = run_of(Cluster(PARAMS, 2, network=Network(kv_event_loss=1.0)), Policies(), small_gsp())
    assert simulation.counts.events_lost > 0
    assert [simulation.routing.index.num_blocks(name) for name in simulation.replicas] == [0, 0]
    assert sum(one.cached_tokens for one in simulation.served) > 0


def test_late_load_reports_are_believed_until_they_come() -> None:
    cluster = Cluster(PARAMS, 2, network=Network(load_delay_s=5.0))
    least = Policies("least-work", "fcfs", "lru")
    tokens = [list(range(1_000 * n, 1_000 * n + 90)) for n in range(1, 4)]
    # One long and one short request are given to the two replicas; when a third comes, both have long been idle.
    arrivals = [
        arrival("long", 0.0, tokens[0]),
        arrival("short", 0.1, tokens[1][:20]),
        arrival("third", 2.0, tokens[2]),
    ]
    placed = {one.request_id: one.replica_id for one in run_of(cluster, least, arrivals).served}
    assert placed["third"] == placed["short"] != placed["long"]


@pytest.mark.parametrize("policies", [BASELINE, Policies()])
def test_restarted_replica_comes_back_empty_and_every_request_ends_once(policies: Policies) -> None:
    arrivals = small_gsp()
    middle_s = arrivals[len(arrivals) // 2].at_s
    cluster = Cluster(PARAMS, 2, faults=(Fault(middle_s, 1, "restart", for_s=1.0),))
    simulation = run_of(cluster, policies, arrivals)
    assert sorted(one.request_id for one in simulation.served) == sorted(one.request_id for one in arrivals)
    assert simulation.counts.sent_again > 0
    assert simulation.counts.incarnations == 3
    simulation.routing.check_integrity(simulation.clock.now_s)
    assert simulation.routing.ledger.num_reserved == simulation.routing.ledger.num_released
    for replica_id, replica in simulation.replicas.items():
        pool = replica.scheduler.kv_cache_manager.block_pool
        assert simulation.routing.index.num_blocks(replica_id) == len(pool.cached_block_hash_to_block)


def test_nothing_of_a_dead_replica_is_heard_however_late_its_news() -> None:
    network = Network(kv_event_delay_s=1.0, load_delay_s=1.0)
    cluster = Cluster(PARAMS, 1, network=network, faults=(Fault(1.0, 0, "restart", for_s=0.5),))
    simulation = Simulation(cluster, Policies(), 0)
    simulation.run([arrival("before", 0.5, list(range(250))), arrival("cold", 3.0, list(range(250)))])
    # "before" ends at 0.78 s; its blocks die at 1 s, before the router has heard of them.
    assert [one.cached_tokens for one in simulation.served] == [0, 0]
    assert simulation.routing.index.num_blocks("replica-0") == 250 // PARAMS.block_size_tokens


def test_requests_wait_while_no_replica_is_there() -> None:
    cluster = Cluster(PARAMS, 1, faults=(Fault(0.1, 0, "restart", for_s=9.9),))
    simulation = run_of(
        cluster, Policies(ordering="fairway"), [arrival("cut", 0.0, list(range(250))), arrival("later", 5.0, [1, 2, 3])]
    )
    # Three steps from 10 s on, the last of them with both.
    assert times(simulation) == {"cut": (10.283, 10.283), "later": (5.283, 5.283)}


def test_slow_replica_takes_its_factor_as_long_and_recovers() -> None:
    cluster = Cluster(PARAMS, 1, faults=(Fault(1.0, 0, "slow", for_s=1.0, factor=3.0),))
    arrivals = [arrival(name, at_s, [n] * 90) for n, (name, at_s) in enumerate([("a", 0.0), ("b", 1.0), ("c", 2.0)])]
    assert times(run_of(cluster, Policies(), arrivals)) == {"a": (0.1, 0.1), "b": (0.3, 0.3), "c": (0.1, 0.1)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(PARAMS, 0), "num_replicas is 0"),
        (lambda: Cluster(PARAMS, 1, faults=(Fault(0.0, 1, "slow"),)), "replica is 1"),
        (lambda: Network(kv_event_delay_s=-1.0), "kv_event_delay_s is -1"),
        (lambda: Network(load_delay_s=float("inf")), "load_delay_s is inf"),
        (lambda: Network(kv_event_loss=1.5), "kv_event_loss is 1.5"),
        (lambda: Fault(-1.0, 0, "slow"), "at_s is -1"),
        (lambda: Fault(0.0, -1, "slow"), "replica is -1"),
        (lambda: Fault(0.0, 0, "slow", for_s=0.0), "for_s is 0"),
        (lambda: Fault(0.0, 0, "slow", factor=0.5), "factor is 0.5"),
        (lambda: Simulation(ONE, Policies(router="random"), 0), "router"),
        (lambda: Simulation(ONE, Policies(ordering="sjf"), 0), "ordering"),
        (lambda: Simulation(ONE, Policies(engine={"fast_weight": 0.5}), 0), "fast_weight"),
        (lambda: Simulation(ONE, Policies(weights={"queue": 0.0}), 0), "queue"),
    ],
)
def test_bad_parameter_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
