"""All that one ingress knows about where requests are and should go: index, ledger, estimator and decisions in one
object.

The Serve router and the simulator call `decide`; the ingress feeds `on_batch`, `set_replicas` and `apply`. Every method
is synchronous and runs in one event loop, so each is atomic. A reservation is made before `decide` returns and is
released by the first of: its Closed event, its replica's departure or restart, its replica's list of open requests
(which heals lost events), or `expire`.
"""

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from serve_app.config import RouterSettings, RoutingDocument
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.baselines import HISTORY_RULES, RULES
from serve_app.router.choice import ReplicaView
from serve_app.router.decisions import Decision, DecisionRing, Record, RouteRequest
from serve_app.router.estimator import ResidualEstimator
from serve_app.router.lifecycle import Closed, FirstToken, LifecycleBatch, Opened
from serve_app.router.load import LoadLedger
from serve_app.router.prefix_index import PrefixIndex
from serve_app.router.routed_history import RoutedHistory
from serve_app.router.totals import Totals

__all__ = ["Decision", "RouteRequest", "RoutingState"]

UNKNOWN_PROMPT_TOKENS = 256
"""Assumed length of a prompt that could not be tokenised: enough that a burst of them spreads."""
DECISIONS_SHOWN = 50
DEAD_INCARNATIONS_KEPT = 16


@dataclass(slots=True)
class _Sequence:
    """Where one replica's life-cycle batches stand."""

    incarnation: str
    next_seq: int
    dead: deque[str] = field(default_factory=lambda: deque(maxlen=DEAD_INCARNATIONS_KEPT))


class RoutingState:
    """One per ingress process. Times are seconds of one clock that the caller chooses."""

    def __init__(self, settings: RouterSettings, profile: PrefillProfile, block_size_tokens: int | None) -> None:
        """Args: block_size_tokens: the engines' KV block size; None until known, which counts no hits."""
        self.block_size_tokens = block_size_tokens
        self.document = settings.routing
        self.index = PrefixIndex(settings.max_index_blocks)
        self.history = RoutedHistory(settings.max_index_blocks)
        self.ledger = LoadLedger(settings.routing.weights.load_half_life_s)
        self.estimator = ResidualEstimator(settings.residual_bound_s, settings.residual_min_samples)
        self.decisions = DecisionRing(settings.decisions_kept)
        self.totals = Totals()
        self._profile = profile
        self._orphan_grace_s = settings.orphan_grace_s
        self._rng = random.Random(settings.seed)
        self._replicas: set[str] = set()
        self._sequences: dict[str, _Sequence] = {}

    def set_replicas(self, ids: Iterable[str]) -> None:
        """The replicas that run now; of those that left, all that is known is dropped at once."""
        present = set(ids)
        for departed in self._replicas - present:
            self.ledger.release_replica(departed)
            self.index.drop(departed)
            self.history.drop(departed)
            self._sequences.pop(departed, None)
        self._replicas = present

    def decide(self, request: RouteRequest, replica_ids: Sequence[str], now_s: float) -> Decision:
        """Pick a replica by the live document and reserve the request's work on it.

        A request id that is open already is decided anew, and its old reservation released.

        Raises:
            ValueError: replica_ids is empty.
        """
        if not replica_ids:
            raise ValueError("replica_ids must name at least one replica")
        self._replicas.update(replica_ids)
        self.ledger.release(request.request_id, now_s)
        views = self._views(request, replica_ids, now_s)
        ranked = RULES[self.document.router](self.document.weights, views, self._rng, self.totals.decisions)
        pick = next(view for view in views if view.replica_id == ranked[0].replica_id)
        decision = Decision(
            request_id=request.request_id,
            replica_id=pick.replica_id,
            router=self.document.router,
            weights_version=self.document.version,
            prompt_tokens=request.prompt_tokens,
            hit_tokens=pick.hit_tokens,
            predicted_s=ranked[0].predicted_s,
            service_s=pick.miss_s + pick.hit_s,
            decided_at_s=now_s,
            candidates=tuple(ranked),
        )
        self.ledger.reserve(request.request_id, pick.replica_id, decision.service_s, now_s)
        if self._keeps_history:
            self.history.record(pick.replica_id, self._history_hashes(request))
        self._keep(request, decision, pick)
        return decision

    def on_batch(self, batch: LifecycleBatch, now_s: float) -> None:
        """Take one replica's life-cycle events; lost, repeated and late batches are all safe.

        An Opened in a late batch is ignored, for its Closed may have come before it.
        """
        in_order = self._advance_sequence(batch)
        for event in batch.events:
            if not isinstance(event, Opened):
                self._on_progress(event, now_s)
            elif in_order:
                self._on_opened(event, batch.replica_id, now_s)
        if in_order and batch.open_ids is not None:
            self._heal(batch.replica_id, batch.open_ids, now_s)

    def expire(self, request_id: str, now_s: float) -> bool:
        """Release a reservation that nobody will report on; False when it is not open."""
        return self.ledger.release(request_id, now_s)

    def apply(self, document: RoutingDocument) -> bool:
        """Follow a newer document from the next decision on; False, and nothing changes, when it is not newer.

        A rule that goes by its history starts with an empty one, unless it follows another such rule.
        """
        if document.version <= self.document.version:
            return False
        self.ledger.half_life_s = document.weights.load_half_life_s
        self.document = document
        if not self._keeps_history:
            self.history.forget_all()
        return True

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """State for `/fairway/state`, ready for JSON; decisions newest first."""
        return {
            **self.document.model_dump(mode="json"),
            "replicas": [
                {
                    "replica_id": replica_id,
                    "load_s": self.ledger.load_s(replica_id, now_s),
                    "num_open": self.ledger.num_open(replica_id),
                    "index_blocks": self.index.num_blocks(replica_id),
                }
                for replica_id in sorted(self._replicas)
            ],
            "totals": {**asdict(self.totals), "index_blocks_forgotten": self.index.num_forgotten},
            "residual": asdict(self.estimator.state),
            "decisions": [record.as_row() for record in self.decisions.newest(DECISIONS_SHOWN)],
        }

    def check_integrity(self, now_s: float) -> None:
        """Raise AssertionError unless every part is sound and only replicas that are there hold anything."""
        self.ledger.check_integrity(now_s)
        self.index.check_integrity()
        self.history.check_integrity(self._replicas if self._keeps_history else frozenset())
        assert len(self.decisions) <= self.decisions.capacity, len(self.decisions)
        assert self.ledger.replica_ids() <= self._replicas, self.ledger.replica_ids() - self._replicas
        assert self._sequences.keys() <= self._replicas, self._sequences.keys() - self._replicas

    def _views(self, request: RouteRequest, replica_ids: Sequence[str], now_s: float) -> list[ReplicaView]:
        hits = self._hit_tokens(request)
        best = max((hits.get(replica_id, 0) for replica_id in replica_ids), default=0)
        views = [self._view(request, replica_id, hits.get(replica_id, 0), best, now_s) for replica_id in replica_ids]
        if self._keeps_history and self.block_size_tokens is not None:
            return self.history.seen(views, self._history_hashes(request), self.block_size_tokens)
        return views

    @property
    def _keeps_history(self) -> bool:
        return self.document.router in HISTORY_RULES

    def _history_hashes(self, request: RouteRequest) -> tuple[bytes, ...]:
        """All of the prompt's blocks, the last included; none when its length or the block size is unknown."""
        known = request.prompt_tokens and self.block_size_tokens is not None
        return request.block_hashes if known else ()

    def _hit_tokens(self, request: RouteRequest) -> dict[str, int]:
        if self.block_size_tokens is None or not request.prompt_tokens:
            return {}
        # An engine always computes the last token, and with it the whole block that holds it.
        most_blocks = max(0, request.prompt_tokens - request.num_prompts) // self.block_size_tokens
        blocks = self.index.hit_blocks(request.block_hashes[:most_blocks])
        return {replica_id: num_blocks * self.block_size_tokens for replica_id, num_blocks in blocks.items()}

    def _view(self, request: RouteRequest, replica_id: str, hit: int, best: int, now_s: float) -> ReplicaView:
        miss = (request.prompt_tokens or UNKNOWN_PROMPT_TOKENS) - hit
        elsewhere = best - hit
        num_prompts, prefill_s = request.num_prompts, self._profile.prefill_s_one
        queue_s, num_open = self.ledger.load_s(replica_id, now_s), self.ledger.num_open(replica_id)
        return ReplicaView(
            replica_id=replica_id,
            hit_tokens=hit,
            miss_tokens=miss,
            elsewhere_tokens=elsewhere,
            miss_s=num_prompts * prefill_s(miss / num_prompts, hit / num_prompts),
            hit_s=self._profile.hit_s(hit),
            queue_s=queue_s,
            affinity_s=prefill_s(elsewhere, hit) - prefill_s(0, hit) if elsewhere else 0.0,
            residual_s=self.estimator.predict_s(_features(miss, hit, queue_s, num_open)),
            num_open=num_open,
        )

    def _keep(self, request: RouteRequest, decision: Decision, pick: ReplicaView) -> None:
        features = _features(pick.miss_tokens, pick.hit_tokens, pick.queue_s, pick.num_open)
        explicit_s = pick.miss_s + pick.hit_s + pick.queue_s
        teaches = request.num_prompts == 1 and request.prompt_tokens > 0
        self.decisions.keep(Record(decision, features, explicit_s, teaches))
        self.totals.decisions += 1
        self.totals.unknown_length += not request.prompt_tokens
        self.totals.prompt_tokens += request.prompt_tokens
        self.totals.hit_tokens += pick.hit_tokens

    def _advance_sequence(self, batch: LifecycleBatch) -> bool:
        """Whether the batch is the newest of its replica's living incarnation; counts what is not as it should be."""
        known = self._sequences.get(batch.replica_id)
        gone = batch.replica_id not in self._replicas
        if gone or (known is not None and (batch.incarnation in known.dead or _is_late(batch, known))):
            self.totals.batches_late += 1
            return False
        self.totals.batches += 1
        if known is None:
            known = self._sequences[batch.replica_id] = _Sequence(batch.incarnation, batch.seq)
        elif known.incarnation != batch.incarnation:
            self._on_restart(known, batch)
        self.totals.batches_lost += batch.seq - known.next_seq
        known.next_seq = batch.seq + 1
        return True

    def _on_restart(self, known: _Sequence, batch: LifecycleBatch) -> None:
        self.totals.restarts += 1
        self.ledger.release_replica(batch.replica_id)
        known.dead.append(known.incarnation)
        known.incarnation, known.next_seq = batch.incarnation, batch.seq

    def _heal(self, replica_id: str, open_ids: frozenset[str], now_s: float) -> None:
        """Make up for lost events: whose Closed was lost is released, whose Opened was lost counts as open."""
        orphans = self.ledger.release_orphans(replica_id, open_ids, self._orphan_grace_s, now_s)
        self.totals.orphans += len(orphans)
        for request_id in open_ids - self.ledger.open_ids(replica_id):
            self._on_opened(Opened(request_id, 0.0), replica_id, now_s)

    def _on_opened(self, event: Opened, replica_id: str, now_s: float) -> None:
        reserved_on = self.ledger.replica_of(event.request_id)
        if reserved_on not in (None, replica_id):
            self.totals.moved += 1
            self.ledger.release(event.request_id, now_s)
        self.ledger.reserve(event.request_id, replica_id, event.service_s, now_s)

    def _on_progress(self, event: FirstToken | Closed, now_s: float) -> None:
        if isinstance(event, FirstToken):
            self.ledger.prefill_done(event.request_id, now_s)
        else:
            self.ledger.release(event.request_id, now_s)
        record = self.decisions.get(event.request_id)
        if record is not None:
            self._observe(record, event)

    def _observe(self, record: Record, event: FirstToken | Closed) -> None:
        observed = record.observed
        if observed.ttft_s is None and event.ttft_s is not None and math.isfinite(event.ttft_s):
            observed.ttft_s, observed.cached_tokens = event.ttft_s, event.cached_tokens
            self.totals.observed_prompt_tokens += event.prompt_tokens
            self.totals.observed_cached_tokens += event.cached_tokens
            if record.teaches:
                self.estimator.observe(record.features, record.explicit_s, event.ttft_s)
        if isinstance(event, Closed) and observed.status is None:
            observed.e2e_s, observed.status = event.e2e_s, event.status
            setattr(self.totals, event.outcome, getattr(self.totals, event.outcome) + 1)


def _is_late(batch: LifecycleBatch, known: _Sequence) -> bool:
    return batch.incarnation == known.incarnation and batch.seq < known.next_seq


def _features(miss_tokens: int, hit_tokens: int, load_s: float, num_open: int) -> dict[str, float]:
    return {
        "miss_tokens": float(miss_tokens),
        "hit_tokens": float(hit_tokens),
        "load_s": load_s,
        "num_open": float(num_open),
    }
