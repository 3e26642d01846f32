"""Workloads: who asks what and when. Generators are pure functions of their parameters and a seeded `Generator`.

Here are the two that are told prompt by prompt, generated shared prefixes and the flood; the others are in `workloads`,
the recorded ones in `traces`. Token ids are drawn uniformly, so that two prompts share exactly the prefix that they
were given to share. Cost: O(tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from serve_app.sim.draws import (
    IntArray,
    TokenArray,
    check_above_zero,
    check_at_least,
    check_from_zero,
    check_shares,
    draw_tokens,
    poisson_times,
    with_prefix,
)

__all__ = ["Arrival", "FloodParams", "GspOrder", "GspParams", "TokenArray", "at_once", "flood", "gsp"]

GspOrder = Literal["random", "grouped", "round-robin"]


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """One request of a workload."""

    at_s: float
    request_id: str
    prompt: TokenArray
    """(n,), the prompt's token ids, n at least 1."""
    output_tokens: int
    """Tokens that it generates, at least 1."""
    phase: str
    """The part of the workload that it is reported under."""


@dataclass(frozen=True, slots=True)
class GspParams:
    """Generated shared prefixes: groups of prompts, each group with a prefix of its own."""

    num_groups: int = 32
    """Groups, at least 1."""
    prompts_per_group: int = 16
    """Prompts in each group, at least 1."""
    prompt_tokens: tuple[int, ...] = (512, 1_024, 2_048, 4_096)
    """Total prompt lengths, each at least 2, cycled over the groups."""
    shared_share: float = 0.5
    """Share of a prompt that is its group's prefix, 0 to 1."""
    output_tokens: int = 4
    """Tokens that each request generates, at least 1."""
    rate_per_s: float = 24.0
    """Arrivals a second of the Poisson process, above 0."""
    order: GspOrder = "random"
    """In which the prompts come: "random"; "grouped", all of one group in a row; or "round-robin", one of each group in
    turn, always in the same order of groups: the worst case of least recently used."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_groups", "prompts_per_group", "output_tokens")
        if not self.prompt_tokens or min(self.prompt_tokens) < 2:
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}; it must name lengths of at least 2")
        check_shares(self, "shared_share")
        check_above_zero(self, "rate_per_s")
        if self.order not in get_args(GspOrder):
            raise ValueError(f"order is {self.order!r}; it must be one of {get_args(GspOrder)}")

    @property
    def ideal_hit_rate(self) -> float:
        """Share of prompt tokens that repeat an earlier prompt's: what a cache without limit could hit, in tokens."""
        return self.shared_share * (1 - 1 / self.prompts_per_group)


def gsp(params: GspParams, rng: np.random.Generator) -> list[Arrival]:
    """All prompts of all groups in the order asked for, at Poisson times; one phase, "all"."""
    prompts = [
        with_prefix(prefix, total_tokens, rng)
        for group in range(params.num_groups)
        for total_tokens in [params.prompt_tokens[group % len(params.prompt_tokens)]]
        for prefix in [draw_tokens(round(params.shared_share * total_tokens), rng)]
        for _ in range(params.prompts_per_group)
    ]
    order = _gsp_order(params, rng)
    times_s = np.cumsum(rng.exponential(1 / params.rate_per_s, len(prompts)))
    return [
        Arrival(float(at_s), f"gsp-{number}", prompts[index], params.output_tokens, "all")
        for number, (at_s, index) in enumerate(zip(times_s, order, strict=True))
    ]


def _gsp_order(params: GspParams, rng: np.random.Generator) -> IntArray:
    by_group = np.arange(params.num_groups * params.prompts_per_group)
    if params.order == "grouped":
        return by_group
    if params.order == "round-robin":
        return by_group.reshape(params.num_groups, params.prompts_per_group).T.ravel()
    return rng.permutation(by_group)


@dataclass(frozen=True, slots=True)
class FloodParams:
    """A backlog of long misses, then a flood of requests that hit almost all of their prompt."""

    num_misses: int = 20
    """Misses that arrive together, at least 1."""
    miss_tokens: int = 6_000
    """Prompt length of a miss, at least 1."""
    hit_prefix_tokens: int = 6_000
    """Prefix that all hits share, at least 1; one request computes it before the backlog comes."""
    hit_tokens: int = 300
    """Tokens that a hit adds to the prefix, at least 1."""
    rate_per_s: float = 40.0
    """Hits a second of the Poisson process, above 0."""
    duration_s: float = 60.0
    """How long hits arrive, above 0."""
    lead_s: float = 5.0
    """Seconds that the request for the prefix has for itself, above 0."""
    start_s: float = 0.0
    """Seconds from the misses to the first time at which a hit may come, at least 0."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_misses", "miss_tokens", "hit_prefix_tokens", "hit_tokens")
        check_above_zero(self, "rate_per_s", "duration_s", "lead_s")
        check_from_zero(self, "start_s")


def flood(params: FloodParams, rng: np.random.Generator) -> list[Arrival]:
    """Phases "lead" (one request), "miss" and "hit", in order of arrival; one output token each."""
    prefix = draw_tokens(params.hit_prefix_tokens, rng)
    lead = [Arrival(0.0, "lead", prefix, 1, "lead")]
    misses = [
        Arrival(params.lead_s, f"miss-{number}", draw_tokens(params.miss_tokens, rng), 1, "miss")
        for number in range(params.num_misses)
    ]
    times_s = poisson_times(params.rate_per_s, params.lead_s + params.start_s, params.duration_s, rng)
    total_tokens = params.hit_prefix_tokens + params.hit_tokens
    hits = [
        Arrival(float(at_s), f"hit-{number}", with_prefix(prefix, total_tokens, rng), 1, "hit")
        for number, at_s in enumerate(times_s)
    ]
    return [*lead, *misses, *hits]


def at_once(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests in the same order, all at time 0 and in one phase, "all": what measures capacity."""
    return [replace(one, at_s=0.0, phase="all") for one in arrivals]
