"""LBGR's choice: the replica with the least predicted cost.

    cost(r) = miss * prefill(miss tokens | context) + hit * hit seconds + queue * load(r) + residual * residual(r)
            + min(price * prefill(tokens cached on another replica but not on r), bound)
    price = affinity + affinity_load * pressure
    bound = `HOME_SLACK_S` + `HOME_SLACK` * mean load of the candidates

all in seconds, weights from `RoutingWeights`. The affinity term is what breaking a prefix's home costs everybody else,
not time that the user waits, so it counts in the cost and not in the predicted TTFT. Its price follows load: a second
of work done twice delays nobody on an idle cluster and a hundred requests on a full one (`pressure`). Pure; O(n log n)
for n candidates.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.config import RoutingWeights

HOME_SLACK_S, HOME_SLACK = 2.0, 0.5
"""A home may be so much more loaded than another replica and still get its prefix, whatever the price: so many seconds,
and so many times the mean load."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What the router knows of one candidate for one request, unweighted."""

    replica_id: str
    hit_tokens: int
    """Leading prompt tokens in the replica's KV cache."""
    miss_tokens: int
    """Prompt tokens that it must compute."""
    elsewhere_tokens: int
    """Leading prompt tokens that the best other replica holds beyond this one's."""
    miss_s: float
    """Prefill seconds of the miss tokens."""
    hit_s: float
    """Seconds that the hit tokens still cost."""
    queue_s: float
    """Seconds of work already assigned to the replica."""
    affinity_s: float
    """Prefill seconds of the tokens held elsewhere."""
    residual_s: float
    """The regression's correction as far as it counts in the choice; may be negative."""
    num_open: int
    """Requests open on the replica."""
    routed_tokens: int = 0
    """Leading prompt tokens, in whole KV blocks, that were routed to the replica before; 0 where no history is kept."""
    history_blocks: int = 0
    """Distinct KV blocks that were ever routed to the replica; 0 where no history is kept."""
    home_order: int = 0
    """Place among replicas of equally long history, smaller first: arbitrary, but fixed for the prefix they share."""
    num_queued: int = 0
    """Of those, requests without a token."""
    home_bound_s: float = math.inf
    """Most that the affinity term may be; one figure for all candidates."""
    pressure: float = 0.0
    """Requests that a second of wasted work would delay (`pressure`); one figure for all candidates."""
    is_trusted: bool = True
    """Whether its KV events are up to date; otherwise `hit_tokens` may come from what was routed there."""


@dataclass(frozen=True, slots=True)
class CandidateTerms:
    """One candidate's weighted terms, the explanation of a choice."""

    replica_id: str
    hit_tokens: int
    miss_s: float
    hit_s: float
    queue_s: float
    affinity_s: float
    residual_s: float
    total_s: float
    """Sum of the weighted terms: what LBGR compares."""
    predicted_s: float
    """Expected TTFT: miss, hit, queue and residual, without weights and the affinity price, at least 0. The pick's is
    corrected further in `Decision.predicted_s`."""


def predict_terms(weights: RoutingWeights, view: ReplicaView) -> CandidateTerms:
    """The candidate's terms under the weights."""
    terms_s = (
        weights.miss * view.miss_s,
        weights.hit * view.hit_s,
        weights.queue * view.queue_s,
        affinity_cost_s(weights, view),
        weights.residual * view.residual_s,
    )
    predicted_s = max(0.0, view.miss_s + view.hit_s + view.queue_s + view.residual_s)
    return CandidateTerms(view.replica_id, view.hit_tokens, *terms_s, sum(terms_s), predicted_s)


def affinity_cost_s(weights: RoutingWeights, view: ReplicaView) -> float:
    """What recomputing here the tokens that another replica holds costs everybody else, at most `home_bound_s`."""
    price = weights.affinity + weights.affinity_load * view.pressure
    return min(view.home_bound_s, price * view.affinity_s)


def rank(weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random) -> list[CandidateTerms]:
    """All candidates, least total first; candidates of exactly the same total in random order.

    With probability `explore` a candidate drawn at random comes first instead.
    """
    keyed = [(terms.total_s, rng.random(), terms) for terms in (predict_terms(weights, view) for view in views)]
    ranked = [terms for _, _, terms in sorted(keyed, key=lambda one: one[:2])]
    if weights.explore and len(ranked) > 1 and rng.random() < weights.explore:
        ranked.insert(0, ranked.pop(rng.randrange(len(ranked))))
    return ranked
