"""What the router knows of each candidate for one request, gathered from the parts that know it."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.choice import HOME_SLACK, HOME_SLACK_S, ReplicaView
from serve_app.router.decisions import RouteRequest
from serve_app.router.estimator import Features, ResidualEstimator
from serve_app.router.load import LoadLedger
from serve_app.router.load_reports import LoadReports
from serve_app.router.prefix_index import PrefixIndex
from serve_app.router.pressure import Pressure
from serve_app.router.routed_history import RoutedHistory

UNKNOWN_PROMPT_TOKENS = 256
"""Assumed length of a prompt that could not be tokenised: enough that a burst of them spreads."""


class Views:
    """Reads the index, the ledger, the engines' reports and the estimator; changes nothing but `blind`'s contents."""

    def __init__(
        self,
        index: PrefixIndex,
        ledger: LoadLedger,
        estimator: ResidualEstimator,
        profile: PrefillProfile,
        max_blind_blocks: int,
    ) -> None:
        self.pressure = Pressure()
        self.reports = LoadReports()
        self.blind = RoutedHistory(max_blind_blocks)
        """What was routed to replicas while their KV events could not be trusted."""
        self.is_trusted: Callable[[str], bool] = lambda replica_id: True
        """Whether the index follows a replica's KV events; the owner of the feed sets it."""
        self._index = index
        self._ledger = ledger
        self._estimator = estimator
        self._profile = profile

    def of(
        self, request: RouteRequest, replica_ids: Sequence[str], block_size_tokens: int | None, now_s: float
    ) -> list[ReplicaView]:
        """One view a candidate, in their order."""
        untrusted = self._untrusted(replica_ids)
        hits = self._hit_tokens(request, replica_ids, untrusted, block_size_tokens)
        queues_s = {one: self.load_s(one, now_s) for one in replica_ids}
        shared = _Shared(
            request=request,
            best_tokens=max(hits.values(), default=0),
            home_bound_s=HOME_SLACK_S + HOME_SLACK * sum(queues_s.values()) / len(queues_s),
            pressure=self.pressure_on(replica_ids, now_s),
        )
        return [
            self._view(shared, one, hits.get(one, 0), queues_s[one], is_trusted=one not in untrusted)
            for one in replica_ids
        ]

    def assigned(self, replica_id: str, service_s: float, hashes: Sequence[bytes], now_s: float) -> None:
        """A request of these blocks went to the replica, which is one of the last candidates."""
        self.pressure.assigned(service_s, now_s)
        if not self.is_trusted(replica_id):
            self.blind.record(replica_id, hashes)

    def pressure_on(self, replica_ids: Sequence[str], now_s: float) -> float:
        """Requests that a second of wasted work would delay on these replicas; see `pressure`."""
        return self.pressure.value(len(replica_ids), now_s) if replica_ids else 0.0

    def load_s(self, replica_id: str, now_s: float) -> float:
        """Seconds of work on the replica: what was assigned, and at least what its engine reported."""
        return max(self._ledger.load_s(replica_id, now_s), self.reports.floor_s(replica_id, now_s))

    def forget(self, replica_id: str) -> None:
        """The replica is gone or has restarted."""
        self.reports.forget(replica_id)
        self.blind.drop(replica_id)

    def check_integrity(self, replica_ids: Set[str]) -> None:
        """Raise AssertionError unless only these replicas have a report or a blind history."""
        self.blind.check_integrity(replica_ids)
        assert self.reports.replica_ids() <= replica_ids, self.reports.replica_ids() - replica_ids

    def _untrusted(self, replica_ids: Sequence[str]) -> Set[str]:
        """Those whose KV events can't be trusted now; of all others the blind history is dropped."""
        untrusted = {replica_id for replica_id in replica_ids if not self.is_trusted(replica_id)}
        for replica_id in replica_ids:
            if replica_id not in untrusted and self.blind.num_blocks(replica_id):
                self.blind.drop(replica_id)
        return untrusted

    def _hit_tokens(
        self,
        request: RouteRequest,
        replica_ids: Sequence[str],
        untrusted: Set[str],
        block_size_tokens: int | None,
    ) -> Mapping[str, int]:
        if block_size_tokens is None or not request.prompt_tokens:
            return {}
        # An engine always computes the last token, and with it the whole block that holds it.
        most_blocks = max(0, request.prompt_tokens - request.num_prompts) // block_size_tokens
        leading = request.block_hashes[:most_blocks]
        blocks = self._index.hit_blocks(leading)
        routed = self.blind.hit_blocks(leading) if untrusted else {}
        for replica_id in untrusted:
            blocks[replica_id] = max(blocks.get(replica_id, 0), routed.get(replica_id, 0))
        return {one: blocks[one] * block_size_tokens for one in replica_ids if one in blocks}

    def _view(self, shared: "_Shared", replica_id: str, hit: int, queue_s: float, *, is_trusted: bool) -> ReplicaView:
        num_prompts, prefill_s = shared.request.num_prompts, self._profile.prefill_s_one
        miss = (shared.request.prompt_tokens or UNKNOWN_PROMPT_TOKENS) - hit
        elsewhere = shared.best_tokens - hit
        return ReplicaView(
            replica_id=replica_id,
            hit_tokens=hit,
            miss_tokens=miss,
            elsewhere_tokens=elsewhere,
            miss_s=num_prompts * prefill_s(miss / num_prompts, hit / num_prompts),
            hit_s=self._profile.hit_s(hit),
            queue_s=queue_s,
            affinity_s=prefill_s(elsewhere, hit) - prefill_s(0, hit) if elsewhere else 0.0,
            residual_s=self._estimator.choice_s(replica_id),
            num_open=self._ledger.num_open(replica_id),
            num_queued=self._ledger.num_working(replica_id),
            home_bound_s=shared.home_bound_s,
            pressure=shared.pressure,
            is_trusted=is_trusted,
        )


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all views of one request have in common."""

    request: RouteRequest
    best_tokens: int
    home_bound_s: float
    pressure: float


def features_of(view: ReplicaView) -> Features:
    """What the estimator learns from, as it is when the request is placed.

    `ahead_s` is what of the queue an order by work left would serve first, were its requests of one size with a spread
    as wide as themselves: half of it for a request like them, little of it for a hit among misses.
    """
    mean_queued_s = view.queue_s / max(1, view.num_queued)
    own_s = view.miss_s + view.hit_s
    return {
        "miss_s": view.miss_s,
        "hit_s": view.hit_s,
        "queue_s": view.queue_s,
        "ahead_s": view.queue_s * own_s / (own_s + mean_queued_s) if own_s else 0.0,
        "num_queued": float(view.num_queued),
        "num_decoding": float(view.num_open - view.num_queued),
    }
