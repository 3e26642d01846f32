"""Questions about passages that a search found: partial prefix hits, and multi-hop questions over short passages.

A prompt is a system prompt, a few passages and a question. Passages are drawn without repetition by Zipf popularity
(the k largest of log weight + Gumbel noise, which is Efraimidis and Spirakis 2006) and stand in order of popularity, so
that the leading ones are often shared while the later ones differ. Sources: the house experiments A2 (multi-hop
questions) and their last section (mostly partial hits). Cost: O(requests x passages in the pool + tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.sim.draws import (
    IntArray,
    TokenArray,
    check_at_least,
    check_bounds,
    check_from_zero,
    draw_pieces,
    draw_tokens,
    uniform_lengths,
    zipf_weights,
)
from serve_app.sim.workloads.documents import question_lengths


@dataclass(frozen=True, slots=True)
class RetrievalParams:
    """A system prompt, passages in order of popularity, and a question."""

    system_tokens: int = 256
    """Tokens that all prompts begin with, at least 0."""
    num_passages: int = 96
    """Passages in the pool, at least as many as a prompt may have; the first is the most popular."""
    passages: tuple[int, int] = (4, 8)
    """Fewest and most passages in a prompt, each at least 1; uniform between."""
    passage_tokens: tuple[int, int] = (400, 1_200)
    """Shortest and longest passage, each at least 1; uniform between."""
    question_tokens: tuple[int, int] = (20, 80)
    """Shortest and longest question, each at least 1; uniform between."""
    zipf_exponent: float = 1.0
    """Exponent of the popularity, at least 0; 0 makes all passages equally popular."""
    passages_tokens: tuple[int, ...] = ()
    """Lengths of real passages, each at least 1, in place of `passage_tokens`: the pool draws its lengths from them,
    each at most once while they last; empty: none."""
    questions_tokens: tuple[int, ...] = ()
    """Lengths of real questions, each at least 1, drawn uniformly in place of `question_tokens`; empty: none."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(0, self, "system_tokens")
        check_bounds(1, self, "passages", "passage_tokens", "question_tokens")
        check_at_least(self.passages[1], self, "num_passages")
        check_from_zero(self, "zipf_exponent")
        for name in ("passages_tokens", "questions_tokens"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{name} has {min(getattr(self, name))}; each must be at least 1")

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """One prompt for each request; the phases make no difference."""
        count = len(phases)
        system = draw_tokens(self.system_tokens, rng)
        pool = draw_pieces(self._pool_lengths(rng), rng)
        ranked = self._ranked(count, rng)
        taken = uniform_lengths(self.passages, count, rng)
        questions = draw_pieces(question_lengths(self.question_tokens, self.questions_tokens, count, rng), rng)
        return [
            np.concatenate([system, *(pool[rank] for rank in sorted(ranks[:number])), question])
            for ranks, number, question in zip(ranked.tolist(), taken.tolist(), questions, strict=True)
        ]

    def _pool_lengths(self, rng: np.random.Generator) -> IntArray:
        if not self.passages_tokens:
            return uniform_lengths(self.passage_tokens, self.num_passages, rng)
        real = np.asarray(self.passages_tokens, dtype=np.int64)
        return rng.choice(real, size=self.num_passages, replace=len(real) < self.num_passages)

    def _ranked(self, count: int, rng: np.random.Generator) -> IntArray:
        """(count, most passages in a prompt), ranks of the passages drawn for each prompt, as they were drawn."""
        keys = np.log(zipf_weights(self.num_passages, self.zipf_exponent)) + rng.gumbel(size=(count, self.num_passages))
        return np.argsort(-keys, axis=1)[:, : self.passages[1]]


MULTIHOP = RetrievalParams(
    system_tokens=64, num_passages=400, passages=(5, 10), passage_tokens=(80, 150), question_tokens=(15, 40)
)
"""Multi-hop questions: more passages, but short ones, of a larger pool."""
