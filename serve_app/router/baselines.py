"""The routing rules by name: LBGR and what it is compared with.

Every rule has one signature and answers with all candidates ranked, first choice first, each with LBGR's terms, so that
a baseline's decisions can be explained and its predictions compared with what was observed.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from serve_app.config import RoutingWeights
from serve_app.router.choice import CandidateTerms, ReplicaView, predict_terms, rank

RoutingRule = Callable[[RoutingWeights, Sequence[ReplicaView], random.Random, int], list[CandidateTerms]]
"""(weights, candidates, generator, number of decisions made before) -> all candidates, first choice first."""


def lbgr(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """Least predicted cost; see `choice`."""
    return rank(weights, views, rng)


def round_robin(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """Each in turn, in the order of their ids, whatever order they are given in."""
    ordered = sorted(views, key=lambda view: view.replica_id)
    start = counter % max(1, len(ordered))
    return [predict_terms(weights, view) for view in ordered[start:] + ordered[:start]]


def power_of_two(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """Of two drawn at random the one with fewer open requests; the undrawn follow in random order."""
    drawn = rng.sample(list(views), len(views))
    drawn[:2] = sorted(drawn[:2], key=lambda view: view.num_open)
    return [predict_terms(weights, view) for view in drawn]


RULES: Mapping[str, RoutingRule] = {"lbgr": lbgr, "round-robin": round_robin, "power-of-two": power_of_two}
"""By the names that `RoutingDocument.router` accepts."""
