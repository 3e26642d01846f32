"""A session's prompts grow: each repeats the one before, its answer's place, and adds to it."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from serve_app.sim.arrivals import Arrival
from serve_app.sim.workloads import AGENT_KINDS, AgentKind, AgentParams, ChatParams, Turn, agent, chat

CHAT = ChatParams(num_clients=30, turns=(2, 4), turn_tokens=20, output_tokens=3, clients_per_s=2.0, think_s=5.0)
KINDS = (AgentKind(3.0, 40, (5, 9), (1, 1), (1, 1), (1, 2)), AgentKind(1.0, 30, (5, 9), (2, 4), (6, 8), (3, 3)))
AGENT = AgentParams(KINDS, sessions_per_s=2.0, duration_s=100.0, think_s=1.0)


def by_session(arrivals: list[Arrival]) -> list[list[Arrival]]:
    sessions: dict[str, list[Arrival]] = defaultdict(list)
    for one in arrivals:
        sessions[one.request_id.rsplit("-", 1)[0]].append(one)
    return list(sessions.values())


def begins_with(prompt: Any, beginning: Any) -> bool:
    return bool(np.array_equal(prompt[: len(beginning)], beginning))


def as_values(arrivals: list[Arrival]) -> list[tuple[Any, ...]]:
    return [(one.at_s, one.request_id, one.prompt.tolist(), one.output_tokens, one.phase) for one in arrivals]


@pytest.mark.parametrize(("generator", "params"), [(chat, CHAT), (agent, AGENT)])
def test_sessions_repeat_by_seed_in_order_with_unique_ids(generator: Any, params: Any) -> None:
    first, again, other = (as_values(generator(params, np.random.default_rng(seed))) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert [one[0] for one in first] == sorted(one[0] for one in first)
    assert len({one[1] for one in first}) == len(first)


def test_chat_turn_repeats_the_prompt_before_and_adds_answer_and_message() -> None:
    sessions = by_session(chat(CHAT, np.random.default_rng(0)))
    assert len(sessions) == 30
    assert {len(session) for session in sessions} == {2, 3, 4}
    for session in sessions:
        assert [len(one.prompt) for one in session] == [20 + 23 * turn for turn in range(len(session))]
        assert all(begins_with(after.prompt, before.prompt) for before, after in pairwise(session))


def test_chat_without_a_system_prompt_shares_nothing_and_with_one_just_that() -> None:
    for system_tokens in (0, 16):
        sessions = by_session(chat(replace(CHAT, system_tokens=system_tokens), np.random.default_rng(0)))
        first = [session[0].prompt for session in sessions]
        assert {len(prompt) for prompt in first} == {system_tokens + 20}
        assert len({tuple(prompt[:system_tokens].tolist()) for prompt in first}) == 1
        assert len({tuple(prompt[system_tokens : system_tokens + 2].tolist()) for prompt in first}) == 30


def test_chat_starts_and_think_times_have_their_means() -> None:
    sessions = by_session(chat(replace(CHAT, num_clients=2_000), np.random.default_rng(0)))
    starts_s = [session[0].at_s for session in sessions]
    gaps_s = [after.at_s - before.at_s for session in sessions for before, after in pairwise(session)]
    assert np.mean(np.diff(starts_s)) == pytest.approx(0.5, rel=0.1)
    assert np.mean(gaps_s) == pytest.approx(5.0, rel=0.08)
    assert np.std(gaps_s) == pytest.approx(5.0, rel=0.1)


def test_real_conversations_give_their_turns() -> None:
    talk = (Turn(10, 2), Turn(5, 7), Turn(1, 1))
    sessions = by_session(chat(replace(CHAT, conversations=(talk,), system_tokens=4), np.random.default_rng(0)))
    assert {tuple((len(one.prompt), one.output_tokens) for one in session) for session in sessions} == {
        ((14, 2), (21, 7), (29, 1))
    }


def test_agents_of_a_kind_share_its_prefix_and_grow_by_their_steps() -> None:
    arrivals = agent(AGENT, np.random.default_rng(0))
    assert max(one.at_s for one in arrivals) < 100.0
    sessions = by_session(arrivals)
    assert {tuple(session[0].prompt[:30].tolist()) for session in sessions} == {
        tuple(session[0].prompt[:30].tolist()) for session in sessions[:20]
    }
    kinds = defaultdict(list)
    for session in sessions:
        kinds[tuple(session[0].prompt[:30].tolist())].append(session)
    once, growing = sorted(kinds.values(), key=lambda own: max(map(len, own)))
    assert len(once) / len(growing) == pytest.approx(3.0, rel=0.5)
    assert {len(session) for session in once} == {1}
    assert all(45 <= len(session[0].prompt) <= 49 for session in once)
    for session in growing:
        assert 35 <= len(session[0].prompt) <= 39
        for before, after in pairwise(session):
            assert begins_with(after.prompt, before.prompt)
            assert 9 <= len(after.prompt) - len(before.prompt) <= 11


def test_mean_steps_tells_the_request_rate() -> None:
    assert AGENT.mean_steps == pytest.approx((3 * 1 + 1 * 3) / 4)
    arrivals = agent(replace(AGENT, duration_s=1_000.0), np.random.default_rng(0))
    assert len(arrivals) / 1_000 == pytest.approx(2.0 * AGENT.mean_steps, rel=0.1)


def test_default_agents_come_in_the_fragments_shares() -> None:
    requests = [kind.weight * sum(kind.steps) / 2 for kind in AGENT_KINDS]
    assert np.array(requests) / sum(requests) == pytest.approx([0.38, 0.14, 0.48])


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        (CHAT, "num_clients", 0),
        (CHAT, "turns", (0, 2)),
        (CHAT, "system_tokens", -1),
        (CHAT, "clients_per_s", 0.0),
        (CHAT, "think_s", float("inf")),
        (CHAT, "conversations", ((),)),
        (Turn(1, 1), "new_tokens", 0),
        (Turn(1, 1), "output_tokens", 0),
        (KINDS[0], "weight", 0.0),
        (KINDS[0], "prefix_tokens", -1),
        (KINDS[0], "steps", (0, 1)),
        (AGENT, "kinds", ()),
        (AGENT, "sessions_per_s", 0.0),
    ],
)
def test_parameter_out_of_range_is_refused_by_name(params: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(params, **{field: value})
