"""Scenarios: what they promise of arrivals, rates, phases and caches, without running them."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from serve_app.emulation.step_time import prefill_time_s, step_time_s
from serve_app.sim.arrivals import Arrival, FloodParams, GspOrder, GspParams, flood, gsp
from serve_app.sim.grid import Built
from serve_app.sim.network import Fault, Network
from serve_app.sim.scenarios import cache, cluster, queue, sizing
from serve_app.sim.scenarios.cache import build_coding, build_conversation, build_recency, build_rounds
from serve_app.sim.scenarios.cluster import build_chat, build_gsp, build_longdoc, build_mooncake, cluster_of
from serve_app.sim.scenarios.queue import AGENTS_START_S, build_agents, build_dynamic, build_flood, build_steady
from serve_app.sim.scenarios.sizing import Repeatable, cache_tokens, engine, one_engine, sizes
from serve_app.sim.step_time import DEVICES
from serve_app.sim.traces import DATA_VARIABLE, TraceParams, data_dir
from serve_app.sim.workloads import (
    FAMILIES,
    PHASES,
    AgentParams,
    ChatParams,
    DynamicParams,
    FilingParams,
    LongdocParams,
    agent,
    chat,
    longdoc,
)

DATA = data_dir(os.environ)
needs_data = pytest.mark.skipif(DATA is None, reason=f"the recorded data is absent; {DATA_VARIABLE} names its folder")

LENGTHS_S = dict(zip(PHASES, DynamicParams(FilingParams(), (1.0, 1.0, 1.0)).durations_s, strict=True))
SMALL_FLOOD = partial(FloodParams, duration_s=5.0, hit_prefix_tokens=960)
A6000 = DEVICES["a6000"]

SMALL_BUILDS: dict[str, Callable[[int], Built]] = {
    "dynamic": partial(build_dynamic, FAMILIES["mixed"]),
    "steady": partial(build_steady, FAMILIES["weak-spot"], 1.05),
    "flood": partial(build_flood, 2_000, 1.2, 0.5),
    "rounds": partial(build_rounds, "random", 0.5, 0.6),
    "recency": partial(build_recency, 0.3),
    "gsp": partial(build_gsp, GspParams(num_groups=4, prompts_per_group=4), cluster_of()),
    "chat": partial(build_chat, ChatParams(num_clients=8), cluster_of()),
    "longdoc": partial(build_longdoc, LongdocParams(num_documents=8), cluster_of()),
}
each_build = pytest.mark.parametrize("name", SMALL_BUILDS)


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Capacity is measured on 60 requests, a flood on its first 5 s."""
    monkeypatch.setattr(sizing, "SIZING_REQUESTS", 60)
    monkeypatch.setattr(queue, "FloodParams", SMALL_FLOOD)
    sizes.cache_clear()
    yield
    sizes.cache_clear()


def count_of(arrivals: Sequence[Arrival], phase: str) -> int:
    return sum(one.phase == phase for one in arrivals)


def same(one: Sequence[Arrival], other: Sequence[Arrival]) -> bool:
    return len(one) == len(other) and all(
        (a.at_s, a.request_id, a.output_tokens, a.phase) == (b.at_s, b.request_id, b.output_tokens, b.phase)
        and np.array_equal(a.prompt, b.prompt)
        for a, b in zip(one, other, strict=True)
    )


def check_sound(built: Built) -> None:
    """In order of time, told apart by their ids, and none too long for the engine."""
    times_s = [one.at_s for one in built.arrivals]
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0.0
    assert len({one.request_id for one in built.arrivals}) == len(built.arrivals)
    params = built.cluster.engine
    room_tokens = (params.device.kv_blocks - 1) * params.block_size_tokens
    assert max(len(one.prompt) + one.output_tokens for one in built.arrivals) <= room_tokens


def is_about_poisson(count: int, expected: float) -> bool:
    """Within five standard deviations."""
    return abs(count - expected) <= 5 * math.sqrt(expected)


@each_build
def test_arrivals_are_sound_and_a_function_of_the_seed(name: str) -> None:
    built = SMALL_BUILDS[name](3)
    check_sound(built)
    again, other = SMALL_BUILDS[name](3), SMALL_BUILDS[name](4)
    assert same(built.arrivals, again.arrivals)
    assert built.cluster == again.cluster
    assert not same(built.arrivals, other.arrivals)


@pytest.mark.parametrize("family", ["filing", "retrieval", "hit-heavy", "mixed"])
def test_dynamic_trace_comes_at_its_loads_of_each_mixs_capacity(family: str) -> None:
    built = build_dynamic(FAMILIES[family], 1)
    size = sizes(Repeatable(FAMILIES[family], 1), "a6000", 0.3, 1, mixes=PHASES)
    assert list(dict.fromkeys(one.phase for one in built.arrivals)) == ["calm", "burst", "spike"]
    for phase, load in {"calm": 0.6, "burst": 0.95, "spike": 1.4}.items():
        expected = load * size.capacity_per_s[phase] * LENGTHS_S[phase]
        assert is_about_poisson(count_of(built.arrivals, phase), expected), phase
    assert built.cluster == one_engine("a6000", size.kv_tokens)
    assert {one.output_tokens for one in built.arrivals} == {1}


def test_dynamic_phases_have_their_own_times_and_the_prompts_that_were_measured() -> None:
    family = FAMILIES["hit-heavy"]
    arrivals = build_dynamic(family, 2).arrivals
    starts_s = dict(zip(PHASES, np.cumsum([0.0, *LENGTHS_S.values()])[:-1].tolist(), strict=True))
    for one in arrivals:
        assert starts_s[one.phase] <= one.at_s < starts_s[one.phase] + LENGTHS_S[one.phase]
    asked = family.prompts([one.phase for one in arrivals], np.random.default_rng(2))
    assert all(np.array_equal(one.prompt, prompt) for one, prompt in zip(arrivals, asked, strict=True))


def test_dynamic_trace_with_decode_is_sized_with_its_output() -> None:
    plain, decoded = build_dynamic(FAMILIES["mixed"], 0), build_dynamic(FAMILIES["mixed"], 0, 32)
    assert {one.output_tokens for one in decoded.arrivals} == {32}
    assert len(decoded.arrivals) < len(plain.arrivals)


@pytest.mark.parametrize("load", [0.7, 1.2])
def test_steady_trace_comes_at_its_load_of_capacity(load: float) -> None:
    family = FAMILIES["weak-spot"]
    built = build_steady(family, load, 5, duration_s=200.0)
    size = sizes(Repeatable(family, 5), "a6000", 0.3)
    assert is_about_poisson(len(built.arrivals), load * size.capacity_per_s["calm"] * 200.0)
    assert built.arrivals[-1].at_s < 200.0
    assert {one.phase for one in built.arrivals} == {"all"}
    assert built.cluster == one_engine("a6000", size.kv_tokens)


@pytest.mark.parametrize(("rate", "start"), [(0.8, 0.0), (1.2, 0.5), (1.2, 0.8)])
def test_flood_comes_at_its_rate_after_its_share_of_the_backlogs_time(
    rate: float, start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[FloodParams] = []

    def recorded(params: FloodParams, rng: np.random.Generator) -> list[Arrival]:
        used.append(params)
        return flood(params, rng)

    monkeypatch.setattr(queue, "flood", recorded)
    built = build_flood(2_000, rate, start, 0)
    params = used[-1]
    assert (params.num_misses, params.miss_tokens) == (20, 2_000)
    # The backlog is 20 steps of 2,000 tokens. Hits compute 300 tokens beside 30 blocks of 32; a full step has 6.8.
    assert params.start_s == pytest.approx(start * 20 * prefill_time_s(A6000, 2_000, 2_048))
    hit_s = 300 / 2_048 * step_time_s(A6000, [(300, 960)] * 6 + [(248, 960)])
    assert params.rate_per_s == pytest.approx(rate / hit_s, rel=0.05)
    assert [count_of(built.arrivals, phase) for phase in ("lead", "miss")] == [1, 20]
    assert {one.at_s for one in built.arrivals if one.phase == "miss"} == {params.lead_s}
    hits = [one for one in built.arrivals if one.phase == "hit"]
    assert min(one.at_s for one in hits) >= params.lead_s + params.start_s
    assert is_about_poisson(len(hits), params.rate_per_s * params.duration_s)


def test_agents_are_replayed_in_order_at_a_load_of_their_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first 60 requests have no long sessions yet, so that a cache sized by them would be too small.
    monkeypatch.setattr(sizing, "SIZING_REQUESTS", 400)
    monkeypatch.setattr(sizing, "completed_per_s", lambda sample, cluster: 2.0)
    low, high = (build_agents(load, 0) for load in (0.7, 1.2))
    everything = agent(AgentParams(sessions_per_s=2.0, duration_s=900.0), np.random.default_rng(0))
    sessions = [one for one in everything if one.at_s >= AGENTS_START_S]
    for built, load in ((low, 0.7), (high, 1.2)):
        check_sound(built)
        assert is_about_poisson(len(built.arrivals), load * 2.0 * 300.0)
        assert all(np.array_equal(one.prompt, own.prompt) for one, own in zip(built.arrivals, sessions, strict=False))
        assert built.arrivals[-1].at_s < 300.0
    assert low.cluster == high.cluster


@pytest.mark.parametrize(("order", "to_next"), [("grouped", 1), ("round-robin", cache.GROUPS)])
def test_rounds_wait_from_the_start_in_their_order(order: GspOrder, to_next: int) -> None:
    arrivals = build_rounds(order, 0.9, 0.7, 0).arrivals
    assert {one.at_s for one in arrivals} == {0.0}
    assert {len(one.prompt) for one in arrivals} == {2_048}
    prefixes = [one.prompt[: round(0.9 * 2_048)] for one in arrivals]
    assert len(prefixes) == 64 * 16
    assert np.array_equal(prefixes[0], prefixes[to_next])
    assert not np.array_equal(prefixes[0], prefixes[cache.ROUNDS if to_next == 1 else 1])


@pytest.mark.parametrize("share", [0.5, 1.1])
def test_rounds_have_a_cache_of_their_share_of_a_round(share: float) -> None:
    one_round_tokens = 64 * (2_048 + 4)
    assert build_rounds("grouped", 0.5, share, 0).cluster == one_engine("l40", round(share * one_round_tokens))


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_recency_has_a_cache_of_its_share_of_what_it_reuses(share: float) -> None:
    built = build_recency(share, 0)
    assert len(built.arrivals) == 1_000
    assert {one.at_s for one in built.arrivals} == {0.0}
    assert built.cluster == one_engine("l40", cache_tokens(built.arrivals, share))


def test_clusters_scenarios_are_their_generators_on_the_cluster_given() -> None:
    four = cluster_of()
    requests, talks, asked = (
        GspParams(num_groups=3),
        ChatParams(num_clients=5),
        LongdocParams(num_documents=4, rate_per_s=2.0),
    )
    for built, generated in (
        (build_gsp(requests, four, 9), gsp(requests, np.random.default_rng(9))),
        (build_chat(talks, four, 9), chat(talks, np.random.default_rng(9))),
        (build_longdoc(asked, four, 9), longdoc(asked, np.random.default_rng(9))),
    ):
        assert same(built.arrivals, generated)
        assert built.cluster is four


def test_cluster_is_four_equal_l40s_with_news_of_their_blocks_unless_said() -> None:
    plain = cluster_of()
    assert (plain.num_replicas, plain.kv_events, plain.engine) == (4, True, engine("l40"))
    faults, network = (Fault(1.0, 1, "slow"),), Network(kv_event_delay_s=1.0)
    other = cluster_of(2, "h200", 64_000, 64, network, faults)
    assert (other.num_replicas, other.network, other.faults) == (2, network, faults)
    assert other.engine == engine("h200", 64_000, 64)


def written_mooncake(path: Path, count: int = 6, gap_s: float = 300.0) -> Path:
    """Requests of three blocks, two of them the same in all, `gap_s` apart."""
    rows = [
        {"timestamp": 1e3 * gap_s * n, "input_length": 1_300, "output_length": 90, "hash_ids": [0, 1, 2 + n]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_conversations_of_another_seed_are_those_of_later_minutes(tmp_path: Path) -> None:
    path = written_mooncake(tmp_path / "trace.jsonl")
    first, later = (build_conversation(path, 0.5, seed) for seed in (0, 1))
    assert (len(first.arrivals), len(later.arrivals)) == (6, 4)
    assert {(one.at_s, one.output_tokens) for one in first.arrivals} == {(0.0, 4)}
    assert first.cluster == one_engine("l40", cache_tokens(first.arrivals, 0.5))


def test_mooncakes_own_times_are_kept_and_hurried(tmp_path: Path) -> None:
    path = written_mooncake(tmp_path / "trace.jsonl")
    params = TraceParams(max_requests=5, rate_multiplier=2.0, output_tokens=64)
    built = build_mooncake(path, params, cluster_of(), 0)
    assert [one.at_s for one in built.arrivals] == [0.0, 150.0, 300.0, 450.0, 600.0]
    assert {one.output_tokens for one in built.arrivals} == {64}


@needs_data
def test_recorded_traces_make_sound_scenarios() -> None:
    assert DATA is not None
    conversation = DATA / "mooncake" / "conversation_trace.jsonl.gz"
    waiting = build_conversation(conversation, 0.3, 4)
    assert len(waiting.arrivals) == 1_000
    assert max(len(one.prompt) for one in waiting.arrivals) <= 32_000
    coding = build_coding(DATA / "coding_sessions" / "sessions_compact.jsonl.gz", 0.3, 0)
    assert len(coding.arrivals) > 500
    assert max(len(one.prompt) for one in coding.arrivals) <= 64_000
    params = TraceParams(max_requests=300, max_prompt_tokens=65_000, rate_multiplier=1.5)
    timed = build_mooncake(conversation, params, cluster_of(device="h200", block_size_tokens=64), 0)
    assert len(timed.arrivals) == 300
    assert timed.arrivals[-1].at_s > timed.arrivals[0].at_s
    for built in (waiting, coding, timed):
        check_sound(built)
    for built in (waiting, coding):
        assert {(one.at_s, one.output_tokens) for one in built.arrivals} == {(0.0, 4)}


def test_devices_of_the_scenarios_are_known() -> None:
    assert {queue.DEVICE, cache.DEVICE, cluster.DEVICE} <= set(DEVICES)
