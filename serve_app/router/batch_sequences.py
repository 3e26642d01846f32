"""Where each replica's life-cycle batches stand: in order, late, lost, or of another incarnation."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from serve_app.router.lifecycle import LifecycleBatch
from serve_app.router.totals import Totals

DEAD_INCARNATIONS_KEPT = 16


class Standing(Enum):
    """What a batch is to its replica."""

    IN_ORDER = auto()
    """The newest of the incarnation that lives."""
    RESTARTED = auto()
    """The first heard of a new incarnation; what was known of the old one is void."""
    LATE = auto()
    """It came again, or after a later one, or from the dead, or from a replica that is not there."""


@dataclass(slots=True)
class _Sequence:
    incarnation: str
    next_seq: int
    dead: deque[str] = field(default_factory=lambda: deque(maxlen=DEAD_INCARNATIONS_KEPT))


class BatchSequences:
    """Counts into the totals it was given."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._sequences: dict[str, _Sequence] = {}

    def take(self, batch: LifecycleBatch, *, is_present: bool) -> Standing:
        """Note the batch and say how it stands. Args: is_present: the replica runs, as far as this ingress knows."""
        known = self._sequences.get(batch.replica_id)
        if not is_present or (known is not None and (batch.incarnation in known.dead or _is_late(batch, known))):
            self._totals.batches_late += 1
            return Standing.LATE
        self._totals.batches += 1
        standing = Standing.IN_ORDER
        if known is None:
            known = self._sequences[batch.replica_id] = _Sequence(batch.incarnation, batch.seq)
        elif known.incarnation != batch.incarnation:
            standing = Standing.RESTARTED
            self._totals.restarts += 1
            known.dead.append(known.incarnation)
            known.incarnation, known.next_seq = batch.incarnation, batch.seq
        self._totals.batches_lost += batch.seq - known.next_seq
        known.next_seq = batch.seq + 1
        return standing

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        self._sequences.pop(replica_id, None)

    def replica_ids(self) -> set[str]:
        """Replicas that were heard."""
        return set(self._sequences)


def _is_late(batch: LifecycleBatch, known: _Sequence) -> bool:
    return batch.incarnation == known.incarnation and batch.seq < known.next_seq
