"""Random candidates for one prompt of 100 tokens, with many ties and with loads on both sides of every threshold."""

import random
from collections.abc import Callable, Iterator, Sequence

from serve_app.router.choice import ReplicaView

PROMPT_TOKENS = 100
NUM_OPEN = (0, 1, 7, 8, 9, 32, 33, 34, 500_000, 500_040, 500_060)
ROUTED_TOKENS = (0, 9, 10, 30, 31, 40, 41, 50, 51, 96)


def random_views(seed: int, count: int) -> Iterator[tuple[list[ReplicaView], random.Random]]:
    """`count` lists of one to six candidates, each with a generator for the rule."""
    rng = random.Random(seed)
    for _ in range(count):
        ids = rng.sample("abcdefgh", rng.randint(1, 6))
        near, matched = rng.random() < 0.6, rng.random() < 0.6
        loads = NUM_OPEN[:6] if near else NUM_OPEN
        routed = ROUTED_TOKENS if matched else ROUTED_TOKENS[:2]
        yield [_view(one, rng, rng.choice(loads), rng.choice(routed)) for one in ids], random.Random(rng.random())


def first_picks(views: Sequence[ReplicaView], *keys: Callable[[ReplicaView], float]) -> set[str]:
    """Ids of those that are least by the first key, of these by the second, and so on: found one key at a time."""
    left = list(views)
    for key in keys:
        least = min(key(view) for view in left)
        left = [view for view in left if key(view) == least]
    return {view.replica_id for view in left}


def _view(replica_id: str, rng: random.Random, num_open: int, routed_tokens: int) -> ReplicaView:
    hit_tokens = rng.choice([0, 16, 48])
    return ReplicaView(
        replica_id=replica_id,
        hit_tokens=hit_tokens,
        miss_tokens=PROMPT_TOKENS - hit_tokens,
        elsewhere_tokens=48 - hit_tokens,
        miss_s=rng.choice([0.1, 0.2]),
        hit_s=1e-3 * hit_tokens,
        queue_s=rng.choice([0.0, 0.5, 1.25]),
        affinity_s=rng.uniform(0, 1),
        residual_s=rng.uniform(-1, 1),
        num_open=num_open,
        routed_tokens=routed_tokens,
        history_blocks=rng.randint(0, 2),
        home_order=rng.randint(0, 3),
    )
