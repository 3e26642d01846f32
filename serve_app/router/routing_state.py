"""All that one ingress knows about where requests are and should go: index, ledger, estimator and decisions in one
object.

The Serve router and the simulator call `decide`; the ingress feeds `on_batch`, `set_replicas` and `apply`. Every method
is synchronous and runs in one event loop, so each is atomic. A reservation is made before `decide` returns and is
released by the first of: its Closed event, its replica's departure or restart, its replica's list of open requests
(which heals lost events), or `expire`. The prompt's KV blocks are expected on the pick from the decision on, until the
replica's own KV events confirm them, the request ends without a token, or `EXPECTED_FOR_S` is over.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from serve_app.config import RouterSettings, RoutingDocument
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.baselines import HISTORY_RULES, RULES
from serve_app.router.batch_sequences import BatchSequences, Standing
from serve_app.router.choice import ReplicaView
from serve_app.router.decisions import Decision, DecisionRing, Record, RouteRequest
from serve_app.router.estimator import ResidualEstimator
from serve_app.router.lifecycle import Closed, EngineReport, FirstToken, LifecycleBatch, Opened
from serve_app.router.load import LoadLedger
from serve_app.router.prefix_index import PrefixIndex
from serve_app.router.routed_history import RoutedHistory
from serve_app.router.totals import Totals
from serve_app.router.views import UNKNOWN_PROMPT_TOKENS, Views, features_of

__all__ = ["UNKNOWN_PROMPT_TOKENS", "Decision", "RouteRequest", "RoutingState"]

DECISIONS_SHOWN = 50
EXPECTED_FOR_S = 120.0
"""Longer than a request waits that will be served; afterwards its blocks have no credit unless events confirmed them.
"""


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
        self._views = Views(self.index, self.ledger, self.estimator, profile, settings.max_index_blocks)
        self._orphan_grace_s = settings.orphan_grace_s
        self._rng = random.Random(settings.seed)
        self._replicas: set[str] = set()
        self._sequences = BatchSequences(self.totals)

    def trust_events_of(self, is_trusted: Callable[[str], bool]) -> None:
        """Ask this, for each candidate of each decision, whether the index follows its KV events."""
        self._views.is_trusted = is_trusted

    def set_replicas(self, ids: Iterable[str]) -> None:
        """The replicas that run now; of those that left, all that is known is dropped at once."""
        present = set(ids)
        for departed in self._replicas - present:
            self.ledger.release_replica(departed)
            self.index.drop(departed)
            self.history.drop(departed)
            self._views.forget(departed)
            self._sequences.forget(departed)
            self.estimator.forget(departed)
        self._replicas = present

    def decide(
        self, request: RouteRequest, replica_ids: Sequence[str], now_s: float, router: str | None = None
    ) -> Decision:
        """Pick a replica and reserve the request's work on it.

        A request id that is open already is decided anew, and its old reservation released.

        Args:
            router: the rule that ranks, by its name in `baselines.RULES`; None: the live document's.

        Raises:
            ValueError: replica_ids is empty.
        """
        if not replica_ids:
            raise ValueError("replica_ids must name at least one replica")
        self._replicas.update(replica_ids)
        self.ledger.release(request.request_id, now_s)
        self.index.expire_expected(now_s, EXPECTED_FOR_S)
        rule = router or self.document.router
        views = self._views_of(request, replica_ids, rule, now_s)
        ranked = RULES[rule](self.document.weights, views, self._rng, self.totals.decisions)
        pick = next(view for view in views if view.replica_id == ranked[0].replica_id)
        explicit_s = pick.miss_s + pick.hit_s + pick.queue_s
        features = features_of(pick)
        decision = Decision(
            request_id=request.request_id,
            replica_id=pick.replica_id,
            router=rule,
            weights_version=self.document.version,
            prompt_tokens=request.prompt_tokens,
            hit_tokens=pick.hit_tokens,
            predicted_s=max(0.0, explicit_s + self.estimator.predict_s(pick.replica_id, features)),
            service_s=pick.miss_s + pick.hit_s,
            decided_at_s=now_s,
            candidates=tuple(ranked),
        )
        self._assign(request, decision, now_s)
        teaches = request.num_prompts == 1 and request.prompt_tokens > 0
        self.decisions.keep(Record(decision, features, explicit_s, teaches))
        self._count(request, decision, pick)
        self.totals.stale_view += not all(view.is_trusted for view in views)
        return decision

    def on_batch(self, batch: LifecycleBatch, now_s: float) -> None:
        """Take one replica's life-cycle events; lost, repeated and late batches are all safe.

        An Opened in a late batch is ignored, for its Closed may have come before it.
        """
        standing = self._sequences.take(batch, is_present=batch.replica_id in self._replicas)
        if standing is Standing.RESTARTED:
            self._unexpect(self.ledger.release_replica(batch.replica_id))
            self._views.forget(batch.replica_id)
            self.estimator.forget(batch.replica_id)
        in_order = standing is not Standing.LATE
        for event in batch.events:
            if not isinstance(event, Opened):
                self._on_progress(event, now_s)
            elif in_order:
                self._on_opened(event, batch.replica_id, now_s)
        if in_order and batch.open_ids is not None:
            self._heal(batch.replica_id, batch.open_ids, now_s)
        if in_order and batch.report is not None:
            self._on_report(batch.replica_id, batch.report, now_s)

    def expire(self, request_id: str, now_s: float) -> bool:
        """Release a reservation that nobody will report on; False when it is not open."""
        self._unexpect([request_id])
        return self.ledger.release(request_id, now_s)

    def apply(self, document: RoutingDocument) -> bool:
        """Follow a newer document from the next decision on; False, and nothing changes, when it is not newer.

        A rule that goes by its history starts with an empty one, unless it follows another such rule.
        """
        if document.version <= self.document.version:
            return False
        self.ledger.half_life_s = document.weights.load_half_life_s
        self.document = document
        if document.router not in HISTORY_RULES:
            self.history.forget_all()
        return True

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """State for `/fairway/state`, ready for JSON; decisions newest first."""
        return {
            **self.document.model_dump(mode="json"),
            "replicas": [
                {
                    "replica_id": replica_id,
                    "load_s": self._views.load_s(replica_id, now_s),
                    "num_open": self.ledger.num_open(replica_id),
                    "index_blocks": self.index.num_blocks(replica_id),
                    "events_trusted": self._views.is_trusted(replica_id),
                    **asdict(self.estimator.errors(replica_id)),
                }
                for replica_id in sorted(self._replicas)
            ],
            "pressure": self._views.pressure_on(sorted(self._replicas), now_s),
            "totals": {**asdict(self.totals), "index_blocks_forgotten": self.index.num_forgotten},
            "index": {
                "entries": self.index.num_entries,
                "max_entries": self.index.max_entries,
                "expected": self.index.num_expected,
                "bytes": self.index.bytes_estimated(),
            },
            "residual": asdict(self.estimator.state),
            "decisions": [record.as_row() for record in self.decisions.newest(DECISIONS_SHOWN)],
        }

    def check_integrity(self, now_s: float) -> None:
        """Raise AssertionError unless every part is sound and only replicas that are there hold anything."""
        self.ledger.check_integrity(now_s)
        self.index.check_integrity()
        self.history.check_integrity(self._replicas)
        self._views.check_integrity(self._replicas)
        assert len(self.decisions) <= self.decisions.capacity, len(self.decisions)
        assert self.ledger.replica_ids() <= self._replicas, self.ledger.replica_ids() - self._replicas
        assert self._sequences.replica_ids() <= self._replicas, self._sequences.replica_ids() - self._replicas
        assert self.estimator.replica_ids() <= self._replicas, self.estimator.replica_ids() - self._replicas

    def _views_of(
        self, request: RouteRequest, replica_ids: Sequence[str], rule: str, now_s: float
    ) -> list[ReplicaView]:
        views = self._views.of(request, replica_ids, self.block_size_tokens, now_s)
        if rule in HISTORY_RULES and self.block_size_tokens is not None:
            return self.history.seen(views, self._known_hashes(request), self.block_size_tokens)
        return views

    def _known_hashes(self, request: RouteRequest) -> tuple[bytes, ...]:
        """All of the prompt's blocks, the last included; none when its length or the block size is unknown."""
        known = request.prompt_tokens and self.block_size_tokens is not None
        return request.block_hashes if known else ()

    def _assign(self, request: RouteRequest, decision: Decision, now_s: float) -> None:
        """Write the pick into everything that the next decision reads."""
        hashes = self._known_hashes(request)
        self.ledger.reserve(request.request_id, decision.replica_id, decision.service_s, now_s)
        self.index.expect(decision.replica_id, request.request_id, hashes, now_s)
        self._views.assigned(decision.replica_id, decision.service_s, hashes, now_s)
        if decision.router in HISTORY_RULES:
            self.history.record(decision.replica_id, hashes)

    def _count(self, request: RouteRequest, decision: Decision, pick: ReplicaView) -> None:
        totals, first = self.totals, decision.candidates[0]
        totals.decisions += 1
        totals.unknown_length += not request.prompt_tokens
        totals.prompt_tokens += request.prompt_tokens
        totals.hit_tokens += pick.hit_tokens
        totals.cold_learner += self.estimator.is_cold()
        if decision.router == "lbgr":
            totals.explored += first.total_s > min(one.total_s for one in decision.candidates)
            totals.homes_overloaded += 0.0 < first.affinity_s >= pick.home_bound_s

    def _heal(self, replica_id: str, open_ids: frozenset[str], now_s: float) -> None:
        """Make up for lost events: whose Closed was lost is released, whose Opened was lost counts as open."""
        orphans = self.ledger.release_orphans(replica_id, open_ids, self._orphan_grace_s, now_s)
        self.totals.orphans += len(orphans)
        self._unexpect(orphans)
        for request_id in open_ids - self.ledger.open_ids(replica_id):
            self._on_opened(Opened(request_id, 0.0), replica_id, now_s)

    def _on_report(self, replica_id: str, report: EngineReport, now_s: float) -> None:
        """Queued tokens as seconds, taken as prompts of equal length."""
        waiting = max(1, report.waiting)
        seconds = waiting * self._profile.prefill_s_one(report.queued_tokens / waiting) if report.queued_tokens else 0.0
        self._views.reports.heard(replica_id, seconds, report.at_s, now_s)

    def _on_opened(self, event: Opened, replica_id: str, now_s: float) -> None:
        reserved_on = self.ledger.replica_of(event.request_id)
        if reserved_on not in (None, replica_id):
            self.totals.moved += 1
            self.ledger.release(event.request_id, now_s)
            self._unexpect([event.request_id])
        self.ledger.reserve(event.request_id, replica_id, event.service_s, now_s)

    def _on_progress(self, event: FirstToken | Closed, now_s: float) -> None:
        if isinstance(event, FirstToken):
            self.ledger.prefill_done(event.request_id, now_s)
        else:
            self.ledger.release(event.request_id, now_s)
            if event.ttft_s is None:
                self._unexpect([event.request_id])
        record = self.decisions.get(event.request_id)
        if record is not None:
            self._observe(record, event)

    def _unexpect(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.index.unexpect(request_id)

    def _observe(self, record: Record, event: FirstToken | Closed) -> None:
        observed = record.observed
        if observed.ttft_s is None and event.ttft_s is not None and math.isfinite(event.ttft_s):
            observed.ttft_s, observed.cached_tokens = event.ttft_s, event.cached_tokens
            self.totals.observed_prompt_tokens += event.prompt_tokens
            self.totals.observed_cached_tokens += event.cached_tokens
            if record.teaches and record.decision.replica_id in self._replicas:
                self.estimator.observe(record.decision.replica_id, record.features, record.explicit_s, event.ttft_s)
        if isinstance(event, Closed) and observed.status is None:
            observed.e2e_s, observed.status = event.e2e_s, event.status
            setattr(self.totals, event.outcome, getattr(self.totals, event.outcome) + 1)
