"""Workloads: who asks what and when. Generators are pure functions of their parameters and a seeded `Generator`.

Token ids are drawn uniformly, so that two prompts share exactly the prefix that they were given to share.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 1_000, 30_000


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

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        _at_least_one(self, "num_groups", "prompts_per_group", "output_tokens")
        if not self.prompt_tokens or min(self.prompt_tokens) < 2:
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}; it must name lengths of at least 2")
        if not 0.0 <= self.shared_share <= 1.0:
            raise ValueError(f"shared_share is {self.shared_share}; it must be from 0 to 1")
        _above_zero(self, "rate_per_s")

    @property
    def ideal_hit_rate(self) -> float:
        """Share of prompt tokens that repeat an earlier prompt's: what a cache without limit could hit, in tokens."""
        return self.shared_share * (1 - 1 / self.prompts_per_group)


def gsp(params: GspParams, rng: np.random.Generator) -> list[Arrival]:
    """All prompts of all groups in random order, at Poisson times; in order of arrival, one phase, "all"."""
    prompts = [
        _with_prefix(prefix, total_tokens, rng)
        for group in range(params.num_groups)
        for total_tokens in [params.prompt_tokens[group % len(params.prompt_tokens)]]
        for prefix in [_tokens(round(params.shared_share * total_tokens), rng)]
        for _ in range(params.prompts_per_group)
    ]
    order = rng.permutation(len(prompts))
    times_s = np.cumsum(rng.exponential(1 / params.rate_per_s, len(prompts)))
    return [
        Arrival(float(at_s), f"gsp-{number}", prompts[index], params.output_tokens, "all")
        for number, (at_s, index) in enumerate(zip(times_s, order, strict=True))
    ]


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

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        _at_least_one(self, "num_misses", "miss_tokens", "hit_prefix_tokens", "hit_tokens")
        _above_zero(self, "rate_per_s", "duration_s", "lead_s")


def flood(params: FloodParams, rng: np.random.Generator) -> list[Arrival]:
    """Phases "lead" (one request), "miss" and "hit", in order of arrival; one output token each."""
    prefix = _tokens(params.hit_prefix_tokens, rng)
    lead = [Arrival(0.0, "lead", prefix, 1, "lead")]
    misses = [
        Arrival(params.lead_s, f"miss-{number}", _tokens(params.miss_tokens, rng), 1, "miss")
        for number in range(params.num_misses)
    ]
    # The number of a Poisson process' arrivals first, then their times, which are uniform given the number.
    num_hits = int(rng.poisson(params.rate_per_s * params.duration_s))
    times_s = params.lead_s + np.sort(rng.uniform(0.0, params.duration_s, num_hits))
    total_tokens = params.hit_prefix_tokens + params.hit_tokens
    hits = [
        Arrival(float(at_s), f"hit-{number}", _with_prefix(prefix, total_tokens, rng), 1, "hit")
        for number, at_s in enumerate(times_s)
    ]
    return [*lead, *misses, *hits]


def _tokens(count: int, rng: np.random.Generator) -> TokenArray:
    return rng.integers(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKEN_IDS, count, dtype=np.int32)


def _with_prefix(prefix: TokenArray, total_tokens: int, rng: np.random.Generator) -> TokenArray:
    return np.concatenate([prefix, _tokens(total_tokens - len(prefix), rng)])


def _at_least_one(params: object, *names: str) -> None:
    for name in names:
        if getattr(params, name) < 1:
            raise ValueError(f"{name} is {getattr(params, name)}; it must be at least 1")


def _above_zero(params: object, *names: str) -> None:
    for name in names:
        if not 0.0 < getattr(params, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(params, name)}; it must be finite and above 0")
