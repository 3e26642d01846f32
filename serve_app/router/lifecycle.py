"""What a replica tells every ingress about its requests: plain values, picklable, numbered so that losses are
noticed."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["finished", "aborted", "rejected", "failed"]
"""How a request ended: answered, left by the client, refused before the engine saw it, or broken by the server."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The request reached the replica."""

    request_id: str
    """The ingress' own id, never the client's."""
    service_s: float
    """Expected seconds of prefill that it brings."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine produced the first token."""

    request_id: str
    ttft_s: float
    """Seconds from reaching the replica to the first token."""
    cached_tokens: int
    """Prompt tokens that the engine found in its KV cache."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The HTTP response is over, whatever became of it; the last event of its request."""

    request_id: str
    status: int
    """HTTP status."""
    outcome: Outcome
    e2e_s: float
    """Seconds from reaching the replica to the end of the response."""
    ttft_s: float | None
    """As in `FirstToken`; None when there was no token."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


LifecycleEvent = Opened | FirstToken | Closed


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the engine itself counted at the end of a step."""

    queued_tokens: int
    """Prompt tokens that the waiting requests have still to compute, without those that they would hit."""
    running: int
    """Sequences that hold KV blocks, in prefill or decode."""
    waiting: int
    """Sequences that hold none yet, preempted ones included."""
    at_s: float
    """Seconds between counting and sending; the receiver's clock may differ. Of a step that is still under way nothing
    is known, so a busy engine's figures are as old as its step is long."""


@dataclass(frozen=True, slots=True)
class LifecycleBatch:
    """Events of one replica since its last batch, in order."""

    replica_id: str
    incarnation: str
    """Differs after every restart of the replica's process."""
    seq: int
    """0, 1, 2, ... within the incarnation."""
    events: tuple[LifecycleEvent, ...]
    open_ids: frozenset[str] | None = None
    """Every request open on the replica after these events, sent every second; None in between."""
    report: EngineReport | None = None
    """The newest figures of the replica's engine; None before its first step and where it counts none."""
