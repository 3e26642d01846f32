"""What is told of the replicas' KV-event feeds: counts since the start, and how each feed stands now."""

from dataclasses import dataclass


@dataclass(slots=True)
class KvEventCounters:
    """What happened to KV events in this process since its start, all replicas together."""

    batches: int = 0
    """Batches applied."""
    events: int = 0
    """Events in them."""
    gaps: int = 0
    """Times that a sequence was skipped."""
    replayed: int = 0
    """Batches that came by replay."""
    resets: int = 0
    """Times that a replica's view was cleared because batches were lost for good, or its engine had restarted."""
    decode_errors: int = 0
    """Messages or batches that could not be read."""
    restarts: int = 0
    """Resets because an engine had restarted under its old topic."""
    dead_batches: int = 0
    """Batches of an engine's former incarnation, thrown away."""


@dataclass(frozen=True, slots=True)
class FeedState:
    """How one replica's feed stands at one moment."""

    silent_s: float
    """Seconds since its last batch or its last answer to the question for one; infinite before the first."""
    lag_s: float
    """How old the last applied batch was when it was applied, by the two machines' clocks; NaN before the first."""
    is_answering: bool
    """False from a question that went unanswered to the next sign of life."""
    is_filling: bool
    """Whether batches are missing at this moment that a replay may still bring."""
    lossless_s: float
    """Seconds since batches were lost for good; infinite when the view holds all that the engine does."""
    is_trusted: bool
    """Heard of, answering, not filling a gap, and either lossless or long enough after the loss."""
