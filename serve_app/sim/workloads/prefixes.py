"""Requests around shared prefixes: hit-heavy, hits that save little, and prefixes that are used soon or never again.

Sources: the house experiments' last section (a hit-heavy spike), A5 (the weak spot: hits only slightly cheaper) and
B2 (a recency-friendly trace, where least recently used should win). Cost: O(tokens + requests x log(requests)).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.sim.draws import (
    TokenArray,
    check_at_least,
    check_bounds,
    check_from_zero,
    check_shares,
    draw_pieces,
    uniform_lengths,
    zipf_ranks,
)


@dataclass(frozen=True, slots=True)
class HitHeavyParams:
    """Mostly short additions to a few hot long prefixes; the rest are long prompts that share nothing."""

    num_prefixes: int = 12
    """Hot prefixes, at least 1; the first is the most popular."""
    prefix_tokens: tuple[int, int] = (4_000, 12_000)
    """Shortest and longest hot prefix, each at least 1; uniform between."""
    added_tokens: tuple[int, int] = (100, 400)
    """Fewest and most tokens that a hit adds to its prefix, each at least 1; uniform between."""
    cold_tokens: tuple[int, int] = (2_000, 12_000)
    """Shortest and longest cold prompt, each at least 1; uniform between."""
    zipf_exponent: float = 1.0
    """Exponent of the prefixes' popularity, at least 0."""
    hit_share: float = 0.7
    """Share of requests that use a hot prefix, 0 to 1, in calm and burst."""
    spike_hit_share: float = 0.95
    """The same in the spike, 0 to 1."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_prefixes")
        check_bounds(1, self, "prefix_tokens", "added_tokens", "cold_tokens")
        check_from_zero(self, "zipf_exponent")
        check_shares(self, "hit_share", "spike_hit_share")

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """One prompt for each request; the phase "spike" has a hit share of its own."""
        count = len(phases)
        prefixes = draw_pieces(uniform_lengths(self.prefix_tokens, self.num_prefixes, rng), rng)
        ranks = zipf_ranks(self.num_prefixes, self.zipf_exponent, count, rng)
        shares = np.where(np.asarray(phases) == "spike", self.spike_hit_share, self.hit_share)
        hits = rng.random(count) < shares
        cold = uniform_lengths(self.cold_tokens, count, rng)
        own = draw_pieces(np.where(hits, uniform_lengths(self.added_tokens, count, rng), cold), rng)
        return [
            np.concatenate([prefixes[rank], tokens]) if hit else tokens
            for rank, hit, tokens in zip(ranks.tolist(), hits.tolist(), own, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class WeakSpotParams:
    """Prompts that share so little that a hit is only slightly cheaper than a miss."""

    num_groups: int = 32
    """Groups, each with a prefix of its own, at least 1; equally popular."""
    prompt_tokens: tuple[int, int] = (2_000, 6_000)
    """Shortest and longest prompt, each at least 2; uniform between, one length a group."""
    shared_share: float = 0.2
    """Share of a prompt that is its group's prefix, 0 to 1."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_groups")
        check_bounds(2, self, "prompt_tokens")
        check_shares(self, "shared_share")

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """One prompt for each request; the phases make no difference."""
        totals = uniform_lengths(self.prompt_tokens, self.num_groups, rng)
        shared = np.rint(self.shared_share * totals).astype(np.int64)
        prefixes = draw_pieces(shared, rng)
        groups = rng.integers(self.num_groups, size=len(phases))
        own = draw_pieces((totals - shared)[groups], rng)
        return [np.concatenate([prefixes[group], tokens]) for group, tokens in zip(groups.tolist(), own, strict=True)]


@dataclass(frozen=True, slots=True)
class RecencyParams:
    """A working set of prefixes that slides: each is used a few times close together and never again."""

    uses: int = 8
    """Requests that use a prefix, at least 1."""
    working_set: int = 16
    """Prefixes in use at one time, about, at least 1: all uses of a prefix lie within about uses x working_set
    requests."""
    prefix_tokens: tuple[int, int] = (1_000, 6_000)
    """Shortest and longest prefix, each at least 1; uniform between."""
    question_tokens: tuple[int, int] = (20, 200)
    """Fewest and most tokens that a request adds, each at least 1; uniform between."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "uses", "working_set")
        check_bounds(1, self, "prefix_tokens", "question_tokens")

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """One prompt for each request; the phases make no difference."""
        # A window of uses to spare at either end: the working set is as full at both ends as in the middle.
        num_prefixes = -(-len(phases) // self.uses) + 2 * self.working_set
        users = np.repeat(np.arange(num_prefixes), self.uses)
        order = np.argsort(users + rng.uniform(0.0, self.working_set, len(users)), kind="stable")
        spare = self.working_set * self.uses
        used = users[order][spare : spare + len(phases)]
        prefixes = draw_pieces(uniform_lengths(self.prefix_tokens, num_prefixes, rng), rng)
        questions = draw_pieces(uniform_lengths(self.question_tokens, len(used), rng), rng)
        return [
            np.concatenate([prefixes[index], question])
            for index, question in zip(used.tolist(), questions, strict=True)
        ]
