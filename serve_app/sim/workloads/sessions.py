"""Sessions: multi-turn chat and agents, whose every prompt repeats the one before and adds to it.

The answers are the engine's, which a generator cannot know: a prompt repeats the earlier answers as random tokens of
the right number. So of an earlier turn only the prompt can be hit, never its answer, and the hit rate of chat is a
lower bound: where a session's engine keeps generated blocks, real chat hits those too. Times are fixed beforehand (an
open loop): a turn comes whether or not the one before has been answered. Sources: the house experiments C2 (128
clients, 2-8 turns, 1,024 new tokens a turn); the agents' kinds from 12 s of Mooncake's older tool and agent trace
(shares, prefixes and lengths of its kinds A, B and C). Cost: O(tokens): a session's prompts are views of one array.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.sim.arrivals import Arrival
from serve_app.sim.draws import (
    FloatArray,
    IntArray,
    TokenArray,
    check_above_zero,
    check_at_least,
    check_bounds,
    draw_tokens,
    poisson_times,
    uniform_lengths,
    with_prefix,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation."""

    new_tokens: int
    """Tokens of the user's message and of whatever else came since the last answer, at least 1."""
    output_tokens: int
    """Tokens of the answer, at least 1."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "new_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class ChatParams:
    """Clients that come at Poisson times and talk for a few turns."""

    num_clients: int = 128
    """Conversations, at least 1."""
    turns: tuple[int, int] = (2, 8)
    """Fewest and most turns of a conversation, each at least 1; uniform between."""
    turn_tokens: int = 1_024
    """Tokens of each user message, at least 1."""
    output_tokens: int = 4
    """Tokens of each answer, at least 1."""
    system_tokens: int = 0
    """Tokens that all conversations begin with, at least 0; at 0 they share nothing with each other."""
    clients_per_s: float = 1.0
    """Clients that start a second, of the Poisson process, above 0."""
    think_s: float = 10.0
    """Mean of the exponential time from a turn's arrival to the next turn's, above 0."""
    conversations: tuple[tuple[Turn, ...], ...] = ()
    """Real conversations, each with a turn, that the clients draw uniformly in place of `turns`, `turn_tokens` and
    `output_tokens`; empty: none."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_clients", "turn_tokens", "output_tokens")
        check_at_least(0, self, "system_tokens")
        check_bounds(1, self, "turns")
        check_above_zero(self, "clients_per_s", "think_s")
        if not all(self.conversations):
            raise ValueError("conversations has one without turns; each must have at least 1")


def chat(params: ChatParams, rng: np.random.Generator) -> list[Arrival]:
    """All turns of all clients in order of arrival; one phase, "all"."""
    system = draw_tokens(params.system_tokens, rng)
    starts_s = np.cumsum(rng.exponential(1 / params.clients_per_s, params.num_clients)).tolist()
    arrivals = []
    for client, start_s in enumerate(starts_s):
        turns = _turns(params, rng)
        times_s = start_s + _after_gaps(len(turns), params.think_s, rng)
        arrivals += _session(f"chat-{client}", system, times_s, turns, rng)
    return sorted(arrivals, key=lambda one: one.at_s)


@dataclass(frozen=True, slots=True)
class AgentKind:
    """Agents that begin with the same tools and system prompt."""

    weight: float
    """Sessions of this kind beside the others', above 0."""
    prefix_tokens: int
    """Tokens of tools and system prompt that all sessions of this kind share, at least 0."""
    task_tokens: tuple[int, int]
    """Fewest and most tokens of the task, each at least 1; uniform between."""
    steps: tuple[int, int]
    """Fewest and most requests of a session, each at least 1; uniform between."""
    step_tokens: tuple[int, int]
    """Fewest and most tokens that a tool's result adds in each later step, each at least 1; uniform between."""
    output_tokens: tuple[int, int]
    """Fewest and most tokens that a request generates, each at least 1; uniform between."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_above_zero(self, "weight")
        check_at_least(0, self, "prefix_tokens")
        check_bounds(1, self, "task_tokens", "steps", "step_tokens", "output_tokens")


AGENT_KINDS = (
    AgentKind(0.38, 6_144, (24, 500), (1, 1), (1, 1), (1, 6)),
    AgentKind(0.14, 2_560, (455, 912), (1, 1), (1, 1), (16, 24)),
    AgentKind(0.08, 512, (400, 4_000), (2, 10), (200, 3_000), (16, 64)),
)
"""Two kinds that ask once after a long shared prefix, and sessions that grow: 38, 14 and 48 of 100 requests, as in the
fragment; the growing ones' steps and outputs are ours (its prompts: median 6,950 tokens)."""


@dataclass(frozen=True, slots=True)
class AgentParams:
    """Agents' sessions, whose context grows step by step."""

    kinds: tuple[AgentKind, ...] = AGENT_KINDS
    """At least one."""
    sessions_per_s: float = 1.0
    """Sessions that start a second, of the Poisson process, above 0; `mean_steps` times this is the request rate once
    the first sessions have ended."""
    duration_s: float = 300.0
    """How long requests arrive, above 0; later steps of a session are left out, so that the rate does not tail off."""
    think_s: float = 5.0
    """Mean of the exponential time from a step's arrival to the next step's, above 0."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        if not self.kinds:
            raise ValueError("kinds is (); it must have at least one")
        check_above_zero(self, "sessions_per_s", "duration_s", "think_s")

    @property
    def mean_steps(self) -> float:
        """Requests of a session on average."""
        return sum(kind.weight * sum(kind.steps) / 2 for kind in self.kinds) / sum(kind.weight for kind in self.kinds)


def agent(params: AgentParams, rng: np.random.Generator) -> list[Arrival]:
    """All steps of all sessions in order of arrival; one phase, "all"."""
    prefixes = [draw_tokens(kind.prefix_tokens, rng) for kind in params.kinds]
    weights = np.asarray([kind.weight for kind in params.kinds])
    starts_s = poisson_times(params.sessions_per_s, 0.0, params.duration_s, rng).tolist()
    picked = rng.choice(len(weights), size=len(starts_s), p=weights / weights.sum()).tolist()
    arrivals = []
    for number, (start_s, index) in enumerate(zip(starts_s, picked, strict=True)):
        steps = _steps(params.kinds[index], rng)
        times_s = start_s + _after_gaps(len(steps), params.think_s, rng)
        arrivals += _session(f"agent-{number}", prefixes[index], times_s, steps, rng)
    return sorted((one for one in arrivals if one.at_s < params.duration_s), key=lambda one: one.at_s)


def _session(
    name: str, prefix: TokenArray, times_s: FloatArray, turns: Sequence[Turn], rng: np.random.Generator
) -> list[Arrival]:
    outputs = np.asarray([turn.output_tokens for turn in turns])
    ends: IntArray = len(prefix) + np.cumsum([turn.new_tokens for turn in turns]) + np.cumsum(outputs) - outputs
    text = with_prefix(prefix, int(ends[-1]), rng)
    return [
        Arrival(at_s, f"{name}-{number}", text[:end], turn.output_tokens, "all")
        for number, (at_s, end, turn) in enumerate(zip(times_s.tolist(), ends.tolist(), turns, strict=True))
    ]


def _turns(params: ChatParams, rng: np.random.Generator) -> Sequence[Turn]:
    if params.conversations:
        return params.conversations[int(rng.integers(len(params.conversations)))]
    return [Turn(params.turn_tokens, params.output_tokens)] * int(uniform_lengths(params.turns, 1, rng)[0])


def _steps(kind: AgentKind, rng: np.random.Generator) -> Sequence[Turn]:
    count = int(uniform_lengths(kind.steps, 1, rng)[0])
    added = uniform_lengths(kind.step_tokens, count, rng)
    added[0] = uniform_lengths(kind.task_tokens, 1, rng)[0]
    outputs = uniform_lengths(kind.output_tokens, count, rng)
    return [Turn(*turn) for turn in zip(added.tolist(), outputs.tolist(), strict=True)]


def _after_gaps(count: int, mean_s: float, rng: np.random.Generator) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(rng.exponential(mean_s, count - 1))])
