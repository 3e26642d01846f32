"""What one ingress counts from its start on."""

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Counts since the start of this ingress."""

    decisions: int = 0
    unknown_length: int = 0
    """Decisions for prompts of unknown length."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens that were predicted to hit on the picked replica."""
    observed_prompt_tokens: int = 0
    observed_cached_tokens: int = 0
    """Of those, tokens that the engines found cached; only requests of this ingress."""
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed: int = 0
    batches: int = 0
    """Life-cycle batches of known replicas."""
    batches_lost: int = 0
    """Sequence numbers skipped."""
    batches_late: int = 0
    """Batches that came again, or after a later one, or of a dead incarnation, or of a replica that is not there."""
    restarts: int = 0
    """Times that a replica showed a new incarnation."""
    moved: int = 0
    """Requests that opened on another replica than the one picked."""
    orphans: int = 0
    """Reservations released because their replica did not know them."""
    cold_learner: int = 0
    """Decisions without the regression, which had too few observations."""
    stale_view: int = 0
    """Decisions in which a candidate's KV events could not be trusted, so that its routing history stood in."""
    homes_overloaded: int = 0
    """Decisions that took a prefix from its home because its price had reached its bound."""
    explored: int = 0
    """Decisions drawn at random."""
