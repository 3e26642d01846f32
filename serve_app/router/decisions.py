"""Routing decisions and what came of them, kept in a bounded ring."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from serve_app.router.choice import CandidateTerms


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What the router needs to know of a request.

    Raises:
        ValueError: prompt_tokens is negative or num_prompts not at least 1.
    """

    request_id: str
    """The ingress' own id, unique among its open requests."""
    prompt_tokens: int
    """Tokens of all its prompts together; 0 when unknown, which routes by load alone."""
    block_hashes: tuple[bytes, ...] = ()
    """Keys of the prompt's full KV blocks (`block_hashes.BlockHasher`); of a batch, those of its first prompt."""
    num_prompts: int = 1
    """Prompts in the request."""
    output_tokens: int | None = None
    """Most tokens the client asked for; None when it did not say."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0:
            raise ValueError(f"prompt_tokens must be at least 0, got {self.prompt_tokens}")
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {self.num_prompts}")


@dataclass(frozen=True, slots=True)
class Decision:
    """Which replica a request got, and why."""

    request_id: str
    replica_id: str
    router: str
    """Name of the rule that decided."""
    weights_version: int
    """Version of the `RoutingDocument` that was in force."""
    prompt_tokens: int
    """0 when unknown."""
    hit_tokens: int
    """Prompt tokens that the picked replica was believed to hold."""
    predicted_s: float
    """Predicted TTFT on the picked replica."""
    service_s: float
    """Seconds that were reserved on it."""
    decided_at_s: float
    candidates: tuple[CandidateTerms, ...]
    """Every candidate, ranked; the first is the pick."""


@dataclass(slots=True)
class Observed:
    """What the replica reported of the request; None where nothing was reported (yet)."""

    ttft_s: float | None = None
    cached_tokens: int | None = None
    e2e_s: float | None = None
    status: int | None = None


@dataclass(slots=True)
class Record:
    """A decision, what the estimator needs to learn from it, and what came of it."""

    decision: Decision
    features: Mapping[str, float]
    """The estimator's features of the pick when it was made."""
    explicit_s: float
    """What the explicit terms predicted for the pick, unweighted."""
    teaches: bool
    """False for a batch of prompts or an unknown length: its TTFT is not one prompt's."""
    observed: Observed = field(default_factory=Observed)

    def as_row(self) -> dict[str, Any]:
        """The decision's fields with `candidates` and `observed` as nested rows, ready for JSON."""
        row = _row(self.decision)
        row["candidates"] = [_row(terms) for terms in self.decision.candidates]
        row["observed"] = _row(self.observed)
        return row


class DecisionRing:
    """The last decisions, by request id in O(1); over capacity the oldest goes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, record: Record) -> None:
        """Add a record as the newest; it replaces one of the same request id."""
        self._records.pop(record.decision.request_id, None)
        self._records[record.decision.request_id] = record
        if len(self._records) > self.capacity:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Record | None:
        """The request's record; None when it was never kept or has left the ring."""
        return self._records.get(request_id)

    def newest(self, count: int) -> Iterator[Record]:
        """At most `count` records, newest first."""
        return islice(reversed(self._records.values()), count)


def _row(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}
