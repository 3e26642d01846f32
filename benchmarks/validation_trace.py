"""The trace of the validation: cache hits, partial hits and misses that queue together, at fixed times with a burst.

A request asks about one of a few documents (Zipf popularity; the document is its prefix) or is a miss with a prompt of
its own. Request i comes an exponential gap after the one before it, with the mean

    1 / (pace(i) * capacity_per_s),   pace: calm, then burst, then calm again

so that the mean utilisation is 1 / sum(share / pace), about 0.9. Cost: O(tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from serve_app.sim.arrivals import Arrival
from serve_app.sim.draws import (
    TokenArray,
    check_at_least,
    check_shares,
    draw_pieces,
    draw_tokens,
    uniform_lengths,
    with_prefix,
    zipf_ranks,
)

ZIPF_EXPONENT = 0.8
PHASES: Sequence[tuple[str, float, float]] = (("calm", 0.5, 0.75), ("burst", 0.3, 1.6), ("drain", 0.2, 0.75))
"""Name, share of the requests, and arrivals over capacity."""


@dataclass(frozen=True, slots=True)
class TraceParams:
    """What the requests are; lengths are uniform between their two bounds, both included."""

    num_requests: int
    """At least 1."""
    num_documents: int
    """Shared prefixes, at least 1."""
    document_tokens: tuple[int, int]
    """Bounds of a document's length, at least 1."""
    question_tokens: tuple[int, int]
    """Bounds of what a request adds to its document, at least 1."""
    miss_tokens: tuple[int, int]
    """Bounds of the length of a prompt that shares nothing, at least 1."""
    miss_share: float = 0.3
    """Probability that a request is a miss, 0 to 1."""
    output_tokens: int = 4
    """Tokens that each request generates, at least 1."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_requests", "num_documents", "output_tokens")
        check_shares(self, "miss_share")
        for name in ("document_tokens", "question_tokens", "miss_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(f"{name} is {(least, most)}; it must be two rising lengths of at least 1")


def requests(params: TraceParams, rng: np.random.Generator) -> list[Arrival]:
    """All requests in order, each at time 0 still."""
    lengths = uniform_lengths(params.document_tokens, params.num_documents, rng)
    documents = draw_pieces(lengths, rng)
    ranks = zipf_ranks(params.num_documents, ZIPF_EXPONENT, params.num_requests, rng)
    misses = rng.random(params.num_requests) < params.miss_share
    phases = _phase_indices(params.num_requests)
    return [
        Arrival(
            at_s=0.0,
            request_id=f"request-{number:03}",
            prompt=_miss(params, rng) if misses[number] else _hit(params, documents[ranks[number]], rng),
            output_tokens=params.output_tokens,
            phase=PHASES[phases[number]][0],
        )
        for number in range(params.num_requests)
    ]


def timed(arrivals: Sequence[Arrival], capacity_per_s: float, rng: np.random.Generator) -> list[Arrival]:
    """The requests at their times, for an engine that completes `capacity_per_s` with a full queue.

    Raises:
        ValueError: capacity_per_s is not above 0.
    """
    if not 0.0 < capacity_per_s < float("inf"):
        raise ValueError(f"capacity_per_s is {capacity_per_s}; it must be finite and above 0")
    paces = np.array([pace for _, _, pace in PHASES])[_phase_indices(len(arrivals))]
    times_s = np.cumsum(rng.exponential(1.0, len(arrivals)) / (paces * capacity_per_s))
    return [replace(one, at_s=float(at_s)) for one, at_s in zip(arrivals, times_s, strict=True)]


def _phase_indices(num_requests: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    ends = np.cumsum([share for _, share, _ in PHASES])
    return np.searchsorted(ends[:-1], np.arange(num_requests) / num_requests, side="right")


def _hit(params: TraceParams, document: TokenArray, rng: np.random.Generator) -> TokenArray:
    question_tokens = int(uniform_lengths(params.question_tokens, 1, rng)[0])
    return with_prefix(document, len(document) + question_tokens, rng)


def _miss(params: TraceParams, rng: np.random.Generator) -> TokenArray:
    return draw_tokens(int(uniform_lengths(params.miss_tokens, 1, rng)[0]), rng)
