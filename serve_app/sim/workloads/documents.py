"""Questions about long documents: excerpts of filings by popularity, and a fixed set of documents in random order.

A prompt is a document and then a question, so the document is the shared prefix. A filing's popularity follows Zipf,
1 / rank^exponent. Sources: the house experiments A1 (excerpts of long filings, Zipf popularity, questions of tens
of tokens, prompts up to 16k tokens; the published lengths are not public) and C2 (512 documents). Cost: O(tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.sim.arrivals import Arrival
from serve_app.sim.draws import (
    IntArray,
    TokenArray,
    check_above_zero,
    check_at_least,
    check_bounds,
    check_from_zero,
    draw_pieces,
    draw_tokens,
    lognormal_lengths,
    uniform_lengths,
    zipf_ranks,
)


@dataclass(frozen=True, slots=True)
class FilingParams:
    """Questions about excerpts of long filings."""

    num_documents: int = 48
    """Excerpts, at least 1; the first is the most popular."""
    median_tokens: float = 4_000.0
    """Median of the excerpts' lognormal lengths, above 0."""
    sigma: float = 0.8
    """Standard deviation of the logarithm of an excerpt's length, at least 0."""
    document_tokens: tuple[int, int] = (1_000, 16_000)
    """Shortest and longest excerpt, each at least 1: lengths are clipped to them."""
    question_tokens: tuple[int, int] = (20, 80)
    """Shortest and longest question, each at least 1; uniform between."""
    zipf_exponent: float = 1.0
    """Exponent of the popularity, at least 0; 0 makes all excerpts equally popular."""
    pages_tokens: tuple[tuple[int, ...], ...] = ()
    """Page lengths of real documents, each document with a page. With them an excerpt is a run of whole pages from a
    random page on, no longer than the length drawn for it (a first page that is longer is cut to it); excerpts that
    begin at the same page share their beginning. Empty: an excerpt is a text of its own."""
    questions_tokens: tuple[int, ...] = ()
    """Lengths of real questions, each at least 1, drawn uniformly in place of `question_tokens`; empty: none."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_documents")
        check_above_zero(self, "median_tokens")
        check_from_zero(self, "sigma", "zipf_exponent")
        check_bounds(1, self, "document_tokens", "question_tokens")
        if any(not pages or min(pages) < 1 for pages in self.pages_tokens):
            raise ValueError("pages_tokens has an empty document or an empty page; each must have at least 1 token")
        if self.questions_tokens and min(self.questions_tokens) < 1:
            raise ValueError(f"questions_tokens has {min(self.questions_tokens)}; each must be at least 1")

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """One excerpt and question for each request; the phases make no difference."""
        documents = self.documents(rng)
        ranks = zipf_ranks(self.num_documents, self.zipf_exponent, len(phases), rng)
        questions = draw_pieces(question_lengths(self.question_tokens, self.questions_tokens, len(phases), rng), rng)
        return [
            np.concatenate([documents[rank], question])
            for rank, question in zip(ranks.tolist(), questions, strict=True)
        ]

    def documents(self, rng: np.random.Generator) -> list[TokenArray]:
        """The excerpts, the most popular first."""
        lengths = lognormal_lengths(self.median_tokens, self.sigma, self.document_tokens, self.num_documents, rng)
        if not self.pages_tokens:
            return draw_pieces(lengths, rng)
        texts = [draw_tokens(sum(pages), rng) for pages in self.pages_tokens]
        picked = rng.integers(len(texts), size=self.num_documents).tolist()
        return [
            _excerpt(texts[index], self.pages_tokens[index], length, rng)
            for index, length in zip(picked, lengths.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LongdocParams:
    """A set of documents, each asked about several times."""

    num_documents: int = 512
    """Documents, at least 1."""
    document_tokens: tuple[int, int] = (4_000, 16_000)
    """Shortest and longest document, each at least 1; uniform between."""
    questions_per_document: int = 4
    """Questions about each document, at least 1."""
    question_tokens: tuple[int, int] = (20, 80)
    """Shortest and longest question, each at least 1; uniform between."""
    rate_per_s: float = 4.0
    """Arrivals a second of the Poisson process, above 0."""
    output_tokens: int = 4
    """Tokens that each request generates, at least 1."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_documents", "questions_per_document", "output_tokens")
        check_bounds(1, self, "document_tokens", "question_tokens")
        check_above_zero(self, "rate_per_s")


def longdoc(params: LongdocParams, rng: np.random.Generator) -> list[Arrival]:
    """All questions about all documents in random order, at Poisson times; one phase, "all"."""
    documents = draw_pieces(uniform_lengths(params.document_tokens, params.num_documents, rng), rng)
    order = rng.permutation(np.repeat(np.arange(params.num_documents), params.questions_per_document))
    questions = draw_pieces(uniform_lengths(params.question_tokens, len(order), rng), rng)
    times_s = np.cumsum(rng.exponential(1 / params.rate_per_s, len(order)))
    return [
        Arrival(at_s, f"longdoc-{number}", np.concatenate([documents[index], question]), params.output_tokens, "all")
        for number, (at_s, index, question) in enumerate(zip(times_s.tolist(), order.tolist(), questions, strict=True))
    ]


def question_lengths(
    bounds_tokens: tuple[int, int], real_tokens: tuple[int, ...], count: int, rng: np.random.Generator
) -> IntArray:
    """(count,), uniform draws from the real lengths, or between the bounds when there are none."""
    if real_tokens:
        return rng.choice(np.asarray(real_tokens, dtype=np.int64), size=count)
    return uniform_lengths(bounds_tokens, count, rng)


def _excerpt(text: TokenArray, pages: tuple[int, ...], length: int, rng: np.random.Generator) -> TokenArray:
    ends = np.cumsum(pages)
    first = int(rng.integers(len(pages)))
    start = int(ends[first]) - pages[first]
    fitting = ends[(ends > start) & (ends <= start + length)]
    return text[start : int(fitting[-1]) if len(fitting) else start + length]
