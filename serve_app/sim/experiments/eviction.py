"""B: which KV block to evict, on one replica.

One L40 with Llama-3.1-8B (derived), first come first served. A full queue from the start, so that throughput is what
the cache saves.
"""

from functools import partial

from serve_app.sim.catalogue import DESCRIPTIONS
from serve_app.sim.chosen import Policies
from serve_app.sim.experiments.base import (
    COMMON_APPROXIMATIONS,
    RECORDED_PARTS,
    Experiment,
    Options,
    Rows,
    each,
)
from serve_app.sim.experiments.ordering import ordered
from serve_app.sim.grid import Built, Case, Scenario
from serve_app.sim.report import Target
from serve_app.sim.scenarios.cache import (
    DEVICE,
    GROUPS,
    PROMPT_TOKENS,
    ROUNDS,
    build_coding,
    build_conversation,
    build_recency,
    build_rounds,
)
from serve_app.sim.scenarios.queue import build_dynamic
from serve_app.sim.workloads import FAMILIES

EVICTIONS = ("lru", "rlt", "adaptive")
PROTECTED_EVICTIONS = ("lru", "rlt")
SHARED_SHARES = (0.5, 0.9)
"""Share of a prompt that is its group's prefix; what is published does not say it."""
ROUND_SHARES = (0.5, 0.6, 0.8, 0.9, 0.98, 1.0)
"""Caches, over the tokens of one round: every group's prefix and what is asked of it once."""
WINDOW_SHARE, WINDOW_HIT_RATE, WINDOW_RATIO = 0.9, 0.35, 6.0
"""In this cache RLT must hit at least this rate, and this many times as much as LRU."""
MAY_LOSE = 0.005
"""Hit rate that a policy may be behind another without being worse."""
SEEDS = 5
CACHE_SHARES = (0.3, 0.7)
"""Caches of the other scenarios, over their reusable tokens."""


def worst_cases(options: Options) -> list[Case]:
    scenarios = [
        Scenario(
            f"shared-{shared:g}-round-{share:g}-seed{seed}",
            partial(build_rounds, "round-robin", shared, share, seed),
            seed,
        )
        for shared in SHARED_SHARES
        for share in ROUND_SHARES
        for seed in options.seeds(SEEDS)
    ]
    return each(scenarios, [ordered("fcfs", eviction) for eviction in EVICTIONS])


def mixed_cases(options: Options) -> list[Case]:
    seeds = options.seeds(SEEDS)
    scenarios = [
        Scenario(f"{name}-seed{seed}", build, seed)
        for name, builds in _mixed(options, seeds).items()
        for seed, build in zip(seeds, builds, strict=True)
    ]
    return each(scenarios, [ordered("fcfs", eviction) for eviction in EVICTIONS])


def _mixed(options: Options, seeds: range) -> dict[str, list["partial[Built]"]]:
    """Scenario -> how to build it for each seed."""
    builds = {
        "random": [partial(build_rounds, "random", 0.5, 0.6, seed) for seed in seeds],
        "grouped": [partial(build_rounds, "grouped", 0.5, 0.6, seed) for seed in seeds],
    }
    for share in CACHE_SHARES:
        builds[f"recency-{share:g}"] = [partial(build_recency, share, seed) for seed in seeds]
    if options.data is not None:
        conversation = options.data / "mooncake" / "conversation_trace.jsonl.gz"
        coding = options.data / "coding_sessions" / "sessions_compact.jsonl.gz"
        parts = [seed % RECORDED_PARTS["conversation"] for seed in seeds]
        for share in CACHE_SHARES:
            builds[f"conversation-{share:g}"] = [partial(build_conversation, conversation, share, n) for n in parts]
        # One cache: these prompts have 35,000 tokens, and the smaller cache is four L40s' already.
        builds["coding-agents-0.3"] = [partial(build_coding, coding, CACHE_SHARES[0], seed) for seed in seeds]
    return builds


def protect_cases(options: Options) -> list[Case]:
    scenarios = [
        Scenario(f"{family}-seed{seed}", partial(build_dynamic, FAMILIES[family], seed), seed)
        for family in ("filing", "retrieval", "hit-heavy")
        for seed in options.seeds(3)
    ]
    policies = [
        Policies("round-robin", ordering, eviction, {"protect_waiting": True} if protect else {})
        for ordering in ("fcfs", "fairway")
        for eviction in PROTECTED_EVICTIONS
        for protect in (False, True)
    ]
    return each(scenarios, policies)


def rlt_over_lru(rows: Rows) -> list[Target]:
    """RLT's hit rate at least LRU's, less half a point."""
    return [
        Target.at_least(f"{scenario}/rlt/hit rate", rates["rlt"], rates["lru"] - MAY_LOSE)
        for scenario, rates in _hit_rates(rows).items()
    ]


def adaptive_over_both(rows: Rows) -> list[Target]:
    """The adaptive eviction's hit rate at least that of the better of the other two, less half a point."""
    return [
        Target.at_least(f"{scenario}/adaptive/hit rate", rates["adaptive"], max(rates["lru"], rates["rlt"]) - MAY_LOSE)
        for scenario, rates in _hit_rates(rows).items()
    ]


def rlt_in_its_window(rows: Rows) -> list[Target]:
    """Where a round does not quite fit, RLT hits many times as much as LRU, and not little."""
    return [
        Target.at_least(
            f"{scenario}/rlt/window", rates["rlt"], max(WINDOW_HIT_RATE, min(1.0, WINDOW_RATIO * rates["lru"]))
        )
        for scenario, rates in _hit_rates(rows).items()
        if f"-round-{WINDOW_SHARE:g}-" in scenario
    ]


def worst_targets(rows: Rows) -> list[Target]:
    return [*rlt_in_its_window(rows), *rlt_over_lru(rows), *adaptive_over_both(rows)]


def mixed_targets(rows: Rows) -> list[Target]:
    return [*rlt_over_lru(rows), *adaptive_over_both(rows)]


def _hit_rates(rows: Rows) -> dict[str, dict[str, float]]:
    """Scenario -> eviction -> hit rate."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["phase"] == "all":
            found.setdefault(row["scenario"], {})[row["eviction"]] = row["hit_rate"]
    return found


EXPERIMENTS = (
    Experiment(
        "evict-worst",
        DESCRIPTIONS["evict-worst"],
        worst_cases,
        worst_targets,
        COMMON_APPROXIMATIONS,
        {"device": f"{DEVICE}, derived", "groups": GROUPS, "rounds": ROUNDS, "prompt_tokens": PROMPT_TOKENS},
        ("eviction",),
    ),
    Experiment(
        "evict-mixed",
        DESCRIPTIONS["evict-mixed"],
        mixed_cases,
        mixed_targets,
        (
            *COMMON_APPROXIMATIONS,
            "Recorded traces come all at once and generate 4 tokens (their times).",
            "Caches of recorded traces are a share of what is reusable, whatever an L40 has room for (their rows).",
        ),
        {"device": f"{DEVICE}, derived", "kv_cache": "0.6 of a round; 30 % and 70 % of the reusable tokens elsewhere"},
        ("eviction",),
    ),
    Experiment(
        "evict-protect",
        DESCRIPTIONS["evict-protect"],
        protect_cases,
        lambda rows: [],
        COMMON_APPROXIMATIONS,
        {"device": "a6000 with Llama-3.1-8B, derived", "kv_cache": "30 % of the reusable tokens"},
        ("ordering", "eviction"),
    ),
)
