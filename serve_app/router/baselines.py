"""The routing rules by name: LBGR and what it is compared with.

Every rule has one signature and answers with all candidates ranked, first choice first, each with LBGR's terms, so that
a baseline's decisions can be explained and its predictions compared with what was observed. Rules that route by their
own history of assignments (`HISTORY_RULES`) read `ReplicaView.routed_tokens`, `history_blocks` and `home_order`; the
routing state keeps that history for them alone. Sources: SGLang's sgl-router (`cache_aware.rs`, `tree.rs`), Ray Serve
LLM 2.60 (`prefix_aware_router.py`, `prefix_tree.py`), LMetric (arXiv 2603.15202). Cost: O(n log n) for n candidates.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from serve_app.config import RoutingWeights
from serve_app.router.choice import CandidateTerms, ReplicaView, predict_terms, rank

RoutingRule = Callable[[RoutingWeights, Sequence[ReplicaView], random.Random, int], list[CandidateTerms]]
"""(weights, candidates, generator, number of decisions made before) -> all candidates, first choice first."""

SGLANG_BALANCE_ABS = 32
"""SGLang balances load when the open requests of two workers differ by more than this."""
SGLANG_BALANCE_REL = 1.0001
"""And the most is more than so many times the least. Both as in the published comparisons; sglang-router 0.3.2 ships 64
and 1.5, and a match threshold of 0.3."""
RAY_MATCH_THRESHOLD = 0.1
"""Ray's rule follows a match from this share of the prompt on."""
PUBLISHED_TICK_S, PUBLISHED_KEPT = 0.02, 31 / 32
"""The published LBGR multiplies its load by 31/32 every 20 ms."""


def lbgr(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """Least predicted cost; see `choice`."""
    return rank(weights, views, rng)


def lbgr_published(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """Least miss + hit + decayed load, as published; equals go to the first by id.

    No affinity term. The published regression is a bias alone, one constant for all workers, clipped at +1 ms, so it
    cannot change a choice and is left out of the comparison. Run it with `PUBLISHED_WEIGHTS`, which hold the half-life
    of the published decay. It differs in two ways: tokens in place of characters, and a request that ends early
    releases what is left of its load.
    """

    def cost_s(view: ReplicaView) -> float:
        return weights.miss * view.miss_s + weights.hit * view.hit_s + weights.queue * view.queue_s

    return _terms(weights, sorted(_by_id(views), key=cost_s))


def round_robin(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """Each in turn, in the order of their ids, whatever order they are given in."""
    ordered = _by_id(views)
    start = counter % max(1, len(ordered))
    return _terms(weights, ordered[start:] + ordered[:start])


def power_of_two(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """Of two drawn at random the one with fewer open requests; the undrawn follow in random order."""
    drawn = _shuffled(views, rng)
    drawn[:2] = sorted(drawn[:2], key=lambda view: view.num_open)
    return _terms(weights, drawn)


def least_work(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """Least seconds of assigned work, whatever the prompt; equals in random order."""
    return _terms(weights, sorted(_shuffled(views, rng), key=lambda view: view.queue_s))


def lmetric(
    weights: RoutingWeights, views: Sequence[ReplicaView], rng: random.Random, counter: int
) -> list[CandidateTerms]:
    """LMetric: least miss tokens x batch size; equals in random order.

    The reading taken is the abstract's: "new prefill tokens" are this request's miss tokens alone, without those that
    wait on the replica, and hits are the prefix index'. The batch size counts this request too (open + 1): else an idle
    replica would cost nothing whatever it lacks.
    """

    def score(view: ReplicaView) -> int:
        return view.miss_tokens * (view.num_open + 1)

    return _terms(weights, sorted(_shuffled(views, rng), key=score))


def cache_aware(
    weights: RoutingWeights,
    views: Sequence[ReplicaView],
    rng: random.Random,
    counter: int,
    *,
    match_threshold: float,
) -> list[CandidateTerms]:
    """SGLang's rule: the fewest open requests when load is uneven, else the best match by history or the least history.

    Load is uneven when the most open requests exceed the least by more than 32 and 1.0001 times the least; equals go to
    the first by id. When it is even, the longest match with what was ever routed to a worker wins if it is more than
    `match_threshold` of the prompt, else the worker with the smallest history. Workers of equally long matches stand in
    an order fixed for the prefix, as the first key of a hash map there (`home_order`); of equally small histories, in
    random order. The pick enters the history in every branch, under uneven load too.

    Differs: whole KV blocks in place of characters, so a match is up to a block shorter; a batch of prompts matches by
    its first; the history forgets its oldest blocks over one cap for all replicas (`max_index_blocks`) where SGLang
    evicts each worker's least recently used leaves once a minute (over 2^24 characters).
    """
    if _is_uneven(views):
        return _terms(weights, sorted(_by_id(views), key=lambda view: view.num_open))
    if any(_match_rate(view) > match_threshold for view in views):
        return _terms(weights, sorted(_by_id(views), key=lambda view: (-view.routed_tokens, view.home_order)))
    return _terms(weights, sorted(_shuffled(views, rng), key=lambda view: view.history_blocks))


def prefix_affinity(
    weights: RoutingWeights,
    views: Sequence[ReplicaView],
    rng: random.Random,
    counter: int,
    *,
    imbalanced_threshold: float,
) -> list[CandidateTerms]:
    """Ray's PrefixCacheAffinityRouter: the best match by history, of several the one with the fewest open requests.

    When the open requests of two replicas differ by more than `imbalanced_threshold` (infinite as shipped), power of
    two decides. A match of less than 0.1 of the prompt sends it to the smallest history. Equals go to the fewest open
    requests, then to the first by id (a fixed order of candidates there). The pick enters the history in every branch.

    Differs: whole KV blocks in place of characters; open requests as the router counts them, in place of queue lengths
    that replicas reported; a full replica is not passed over. Nothing is evicted as shipped; here the history forgets
    its oldest blocks over the cap.
    """
    open_counts = [view.num_open for view in views]
    if open_counts and max(open_counts) - min(open_counts) > imbalanced_threshold:
        return power_of_two(weights, views, rng, counter)
    if any(_match_rate(view) >= RAY_MATCH_THRESHOLD for view in views):
        return _terms(weights, sorted(_by_id(views), key=lambda view: (-view.routed_tokens, view.num_open)))
    return _terms(weights, sorted(_by_id(views), key=lambda view: (view.history_blocks, view.num_open)))


RULES: Mapping[str, RoutingRule] = {
    "lbgr": lbgr,
    "round-robin": round_robin,
    "power-of-two": power_of_two,
    "least-work": least_work,
    "cache-aware-0.3": partial(cache_aware, match_threshold=0.3),
    "cache-aware-0.4": partial(cache_aware, match_threshold=0.4),
    "cache-aware-0.5": partial(cache_aware, match_threshold=0.5),
    "prefix-affinity": partial(prefix_affinity, imbalanced_threshold=math.inf),
    "prefix-affinity-8": partial(prefix_affinity, imbalanced_threshold=8),
    "lmetric": lmetric,
    "lbgr-published": lbgr_published,
}
"""By the names that `RoutingDocument.router` accepts."""

HISTORY_RULES = frozenset(name for name in RULES if name.startswith(("cache-aware", "prefix-affinity")))
"""Rules that read what was routed before; for the others no history is kept."""

PUBLISHED_WEIGHTS: Mapping[str, RoutingWeights] = {
    "lbgr-published": RoutingWeights(
        miss=1.0,
        hit=1.0,
        queue=1.0,
        affinity=0.0,
        residual=0.0,
        load_half_life_s=PUBLISHED_TICK_S * math.log(2) / -math.log(PUBLISHED_KEPT),
    )
}
"""Weights that a rule must run with to be as published; whoever selects the rule by name applies them."""


def _terms(weights: RoutingWeights, ordered: Sequence[ReplicaView]) -> list[CandidateTerms]:
    return [predict_terms(weights, view) for view in ordered]


def _by_id(views: Sequence[ReplicaView]) -> list[ReplicaView]:
    return sorted(views, key=lambda view: view.replica_id)


def _shuffled(views: Sequence[ReplicaView], rng: random.Random) -> list[ReplicaView]:
    """In random order, so that a stable sort breaks ties at random."""
    return rng.sample(list(views), len(views))


def _is_uneven(views: Sequence[ReplicaView]) -> bool:
    most = max((view.num_open for view in views), default=0)
    least = min((view.num_open for view in views), default=0)
    return most - least > SGLANG_BALANCE_ABS and most > SGLANG_BALANCE_REL * least


def _match_rate(view: ReplicaView) -> float:
    """Share of the prompt that was routed to the replica before; 0 for a prompt of no tokens."""
    prompt_tokens = view.hit_tokens + view.miss_tokens
    return view.routed_tokens / prompt_tokens if prompt_tokens else 0.0
