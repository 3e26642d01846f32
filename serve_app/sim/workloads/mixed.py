"""Mixed lengths: short chat-like prompts, middling ones with retrieved passages, and a few long documents.

Each kind is a family of its own; here is only which request is of which kind. Source: the house
experiments A2 (mixed lengths). Cost: the families' own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from serve_app.sim.draws import TokenArray, check_at_least, check_bounds, draw_pieces, draw_tokens, uniform_lengths
from serve_app.sim.workloads.documents import FilingParams
from serve_app.sim.workloads.passages import RetrievalParams


@dataclass(frozen=True, slots=True)
class MixedParams:
    """Three kinds of requests in one queue."""

    shares: tuple[float, float, float] = (0.6, 0.3, 0.1)
    """Shares of requests that are chat-like, with passages, and with a long document; each from 0 to 1, 1 in all."""
    system_tokens: int = 128
    """Tokens that all chat-like prompts begin with, at least 0."""
    chat_tokens: tuple[int, int] = (200, 1_000)
    """Shortest and longest chat-like prompt with its system prompt, each above system_tokens; uniform between."""
    retrieval: RetrievalParams = field(default_factory=lambda: RetrievalParams(passages=(2, 5)))
    """The prompts with passages."""
    filing: FilingParams = field(default_factory=lambda: FilingParams(num_documents=16, median_tokens=8_000.0))
    """The prompts with a long document."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        if len(self.shares) != 3 or min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-9:
            raise ValueError(f"shares is {self.shares}; it must be three numbers from 0 to 1 with the sum 1")
        check_at_least(0, self, "system_tokens")
        check_bounds(self.system_tokens + 1, self, "chat_tokens")

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """One prompt for each request; the phases make no difference."""
        # A generator for each kind, so that the documents do not depend on how many requests there are.
        own_rngs = rng.spawn(3)
        kinds = rng.choice(3, size=len(phases), p=self.shares)
        makers = (self._chat, self.retrieval.prompts, self.filing.prompts)
        made: list[TokenArray] = [np.empty(0, dtype=np.int32)] * len(phases)
        for kind, (maker, own_rng) in enumerate(zip(makers, own_rngs, strict=True)):
            places = np.flatnonzero(kinds == kind).tolist()
            for place, prompt in zip(places, maker([phases[place] for place in places], own_rng), strict=True):
                made[place] = prompt
        return made

    def _chat(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        system = draw_tokens(self.system_tokens, rng)
        own = draw_pieces(uniform_lengths(self.chat_tokens, len(phases), rng) - self.system_tokens, rng)
        return [np.concatenate([system, tokens]) for tokens in own]
