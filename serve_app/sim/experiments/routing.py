"""C: routing and eviction over several replicas, and all three decisions together.

L40s with Llama-3.1-8B (derived), steps of 2,048 tokens, and the KV cache that fits beside the weights unless said.
"""

from dataclasses import dataclass, replace
from functools import partial

from serve_app.sim.arrivals import GspParams
from serve_app.sim.catalogue import DESCRIPTIONS
from serve_app.sim.chosen import BASELINE, Policies
from serve_app.sim.experiments.base import (
    COMMON_APPROXIMATIONS,
    RECORDED_PARTS,
    Experiment,
    Options,
    each,
    suffix,
)
from serve_app.sim.experiments.routing_targets import all_over_pairs, default_over_all, parity
from serve_app.sim.grid import Case, Scenario
from serve_app.sim.network import Fault, Network
from serve_app.sim.run import Cluster
from serve_app.sim.scenarios.cluster import (
    DEVICE,
    NUM_REPLICAS,
    build_chat,
    build_gsp,
    build_longdoc,
    build_mooncake,
    cluster_of,
)
from serve_app.sim.traces import TraceParams
from serve_app.sim.workloads import ChatParams, LongdocParams

GSP = GspParams(
    num_groups=128,
    prompts_per_group=32,
    prompt_tokens=(512, 1_024, 2_048, 4_096, 8_192),
    shared_share=0.5,
    output_tokens=4,
    rate_per_s=12.0,
)
RATES_PER_S = (8.0, 12.0, 14.0, 16.0)
CACHE_AWARE = ("cache-aware-0.3", "cache-aware-0.4", "cache-aware-0.5")
ROUTERS = (
    "round-robin",
    "least-work",
    "power-of-two",
    *CACHE_AWARE,
    "prefix-affinity",
    "prefix-affinity-8",
    "lmetric",
    "lbgr-published",
    "lbgr",
)
ORDERINGS, EVICTIONS = ("fcfs", Policies().ordering), ("lru", Policies().eviction)
"""Inside the replicas: plain vLLM's, and ours by default."""
STOCK, OURS = zip(ORDERINGS, EVICTIONS, strict=True)
PUBLISHED_INSIDE = Policies("lbgr", "fairway", "rlt")
"""Our router with ordering and eviction inside as published; what they are by default is compared in `defaults`."""
GSP_SEEDS = 5
GSP_ROUTERS = [name for name in ROUTERS if name not in ("least-work", "power-of-two", "prefix-affinity-8")]
"""Without those that are far behind where prefixes are shared; `trace`, `chat` and `longdoc` have every one."""
GSP_POLICIES = [
    *(Policies(router, *inside) for router in GSP_ROUTERS for inside in (STOCK, OURS)),
    *(Policies(router, "fcfs", "rlt") for router in ("cache-aware-0.5", "lbgr-published")),
]
"""Every router with plain vLLM's ordering and eviction inside and with ours, and the published rows."""


def gsp_scenario(rate_per_s: float, options: Options, seed: int, designed: int = 1) -> Scenario:
    """Args: designed: traces that the experiment was designed for."""
    build = partial(build_gsp, replace(GSP, rate_per_s=rate_per_s), cluster_of(), seed)
    return Scenario(f"gsp-{rate_per_s:g}{suffix(options, seed, designed)}", build, seed)


def gsp_cases(options: Options) -> list[Case]:
    scenarios = [
        gsp_scenario(rate_per_s, options, seed, GSP_SEEDS)
        for rate_per_s in RATES_PER_S
        for seed in options.seeds(GSP_SEEDS)
    ]
    return each(scenarios, GSP_POLICIES)


LONG_BLOCK_TOKENS = 64
"""KV blocks where prompts have 10,000 tokens and more."""
CHAT = ChatParams(num_clients=128, turns=(2, 8), turn_tokens=1_024, output_tokens=64, system_tokens=512)
CHAT_RATES = {"chat-calm": 0.8, "chat-busy": 1.6}
"""Clients that start a second."""
LONGDOC_RATES = {"longdoc-calm": 1.5, "longdoc-busy": 2.0}


def chat_scenarios(options: Options) -> list[Scenario]:
    return [
        Scenario(f"{name}{suffix(options, seed)}", partial(build_chat, params, cluster_of(), seed), seed)
        for seed in options.seeds(1)
        for name, rate in CHAT_RATES.items()
        for params in [replace(CHAT, clients_per_s=rate)]
    ]


def longdoc_scenarios(options: Options) -> list[Scenario]:
    long_prompts = cluster_of(block_size_tokens=LONG_BLOCK_TOKENS)
    return [
        Scenario(f"{name}{suffix(options, seed)}", partial(build_longdoc, params, long_prompts, seed), seed)
        for seed in options.seeds(1)
        for name, rate in LONGDOC_RATES.items()
        for params in [LongdocParams(questions_per_document=3, rate_per_s=rate)]
    ]


TRACE_REQUESTS = 1_200
TRACE_RATES = {"conversation": 1.5, "synthetic": 1.5}
"""Over the trace's own rate."""


def trace_scenarios(options: Options) -> list[Scenario]:
    """Mooncake's two whole traces on H200s, as their prompts are too long for an L40 to serve at this rate."""
    if options.data is None:
        return []
    cluster = cluster_of(device="h200", block_size_tokens=LONG_BLOCK_TOKENS)
    return [
        Scenario(f"{name}{suffix(options, seed)}", partial(build_mooncake, path, params, cluster, seed), seed)
        for seed in options.seeds(1)
        for name, rate in TRACE_RATES.items()
        for path in [options.data / "mooncake" / f"{name}_trace.jsonl.gz"]
        for params in [
            TraceParams(
                start_s=600.0 * (seed % RECORDED_PARTS[name]),
                max_requests=TRACE_REQUESTS,
                rate_multiplier=rate,
                max_prompt_tokens=65_000,
                output_tokens=64,
            )
        ]
    ]


EVERY_ROUTER = [Policies(router, *inside) for router in ROUTERS for inside in (STOCK, OURS)]
ALL_THREE = [
    Policies(router, ordering, eviction)
    for router in (BASELINE.router, "cache-aware-0.4", "lbgr")
    for eviction in EVICTIONS
    for ordering in ORDERINGS
]
"""Each of our decisions on and off, from what a cluster does without us, and from the best cache-aware rule."""


def joint_cases(options: Options) -> list[Case]:
    """Each decision alone, each pair, and all three, on every workload of this part."""
    gsps = [gsp_scenario(rate, options, seed) for seed in options.seeds(1) for rate in (8.0, 12.0, 14.0)]
    scenarios = [*gsps, *chat_scenarios(options), *longdoc_scenarios(options), *trace_scenarios(options)]
    return each(scenarios, ALL_THREE)


def defaults_cases(options: Options) -> list[Case]:
    """All defaults together, against the published parts inside and against what a cluster does without us."""
    gsps = [gsp_scenario(rate, options, seed) for seed in options.seeds(1) for rate in (8.0, 12.0, 14.0)]
    scenarios = [*gsps, *chat_scenarios(options), *longdoc_scenarios(options), *trace_scenarios(options)]
    policies = [BASELINE, Policies("cache-aware-0.4", "fcfs", "lru"), PUBLISHED_INSIDE, Policies()]
    return each(scenarios, policies)


SWEPT = [
    BASELINE,
    Policies("cache-aware-0.4", "fcfs", "lru"),
    Policies("lbgr-published", "fcfs", "rlt"),
    PUBLISHED_INSIDE,
]
SMALL_GSP = replace(GSP, prompts_per_group=8)
FOUR = cluster_of()


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep."""

    name: str
    params: GspParams = SMALL_GSP
    cluster: Cluster = FOUR


def sweep_points() -> list[Point]:
    """One thing changed at a time, from 12 requests a second on four replicas."""
    prefix_tokens = sum(SMALL_GSP.prompt_tokens) // len(SMALL_GSP.prompt_tokens) * SMALL_GSP.num_groups // 2
    return [
        *(Point(f"replicas-{n}", replace(SMALL_GSP, rate_per_s=3.0 * n), cluster_of(n)) for n in (1, 2, 4, 8, 10)),
        *(Point(f"rate-{rate:g}", replace(SMALL_GSP, rate_per_s=rate)) for rate in (4.0, 20.0)),
        *(
            Point(f"cache-{share:.0%}", cluster=cluster_of(kv_tokens=round(share * prefix_tokens)))
            for share in (0.5, 0.7, 0.9)
        ),
        *(Point(f"output-{n}", replace(SMALL_GSP, output_tokens=n)) for n in (32, 128)),
        *(Point(f"shared-{share:g}", replace(SMALL_GSP, shared_share=share)) for share in (0.2, 0.9)),
        *(Point(f"order-{order}", replace(SMALL_GSP, order=order)) for order in ("grouped", "round-robin")),
        *(
            Point(f"kv-event-delay-{delay:g}s", cluster=cluster_of(network=Network(kv_event_delay_s=delay)))
            for delay in (0.2, 1.0, 5.0)
        ),
        *(
            Point(f"kv-event-loss-{loss:.0%}", cluster=cluster_of(network=Network(kv_event_loss=loss)))
            for loss in (0.05, 0.5)
        ),
        *(
            Point(f"load-delay-{delay:g}s", cluster=cluster_of(network=Network(load_delay_s=delay)))
            for delay in (0.2, 1.0, 5.0)
        ),
    ]


HALF_LIVES_S, AFFINITIES, RESIDUAL_BOUNDS_S = (
    (0.1, 0.44, 2.0, 10.0, 600.0),
    (0.0, 1.0, 4.0, 8.0, 16.0),
    (0.001, 10.0, 1_000.0),
)
PRICED = [replace(PUBLISHED_INSIDE, weights={"affinity": value, "affinity_load": 0.0}) for value in AFFINITIES]
"""What a fixed price of a prefix's home does; the default, which follows load, is run beside them."""
WEIGHTED = [
    *PRICED,
    *(Policies("lbgr-published", "fcfs", "lru", weights={"load_half_life_s": value}) for value in HALF_LIVES_S),
    *(replace(PUBLISHED_INSIDE, weights={"affinity_load": 0.0, "load_half_life_s": value}) for value in HALF_LIVES_S),
    *(replace(PUBLISHED_INSIDE, settings={"residual_bound_s": value}) for value in RESIDUAL_BOUNDS_S),
    replace(PUBLISHED_INSIDE, weights={"residual": 0.0}),
    PUBLISHED_INSIDE,
]


def sweep_cases(options: Options) -> list[Case]:
    points = [
        Scenario(f"{point.name}{suffix(options, seed)}", partial(build_gsp, point.params, point.cluster, seed), seed)
        for seed in options.seeds(1)
        for point in sweep_points()
    ]
    weighted = {
        rate_per_s: [
            Scenario(
                f"weights-{rate_per_s:g}{suffix(options, seed)}",
                partial(build_gsp, replace(SMALL_GSP, rate_per_s=rate_per_s), cluster_of(), seed),
                seed,
            )
            for seed in options.seeds(1)
        ]
        for rate_per_s in (8.0, 12.0, 14.0)
    }
    return [
        *each(points, SWEPT),
        *each(weighted[12.0], WEIGHTED),
        *each([*weighted[8.0], *weighted[14.0]], [*PRICED, PUBLISHED_INSIDE]),
    ]


FAULT_AT_S, FAULT_FOR_S = 60.0, 20.0
FAULT_ROUTERS = [replace(Policies(), router=router) for router in ROUTERS]


def fault_cases(options: Options) -> list[Case]:
    """Where learned routing is known to fail; ordering and eviction inside are ours."""
    six = replace(SMALL_GSP, rate_per_s=6.0)
    ten = replace(SMALL_GSP, rate_per_s=10.0)
    restart, slow = Fault(FAULT_AT_S, 1, "restart", FAULT_FOR_S), Fault(FAULT_AT_S, 1, "slow", factor=2.0)
    alone = replace(CHAT, turns=(1, 1), system_tokens=0, turn_tokens=3_072, num_clients=1_024, clients_per_s=6.0)
    scenarios = [
        Scenario(f"{name}{suffix(options, seed)}", build, seed)
        for seed in options.seeds(1)
        for name, build in {
            "two-replicas": partial(build_gsp, six, cluster_of(2), seed),
            "no-shared-prefix": partial(build_chat, alone, cluster_of(), seed),
            "no-fault": partial(build_gsp, ten, cluster_of(), seed),
            "restart": partial(build_gsp, ten, cluster_of(faults=(restart,)), seed),
            "slow": partial(build_gsp, ten, cluster_of(faults=(slow,)), seed),
        }.items()
    ]
    return each(scenarios, FAULT_ROUTERS)


PARAMETERS = {"device": f"{DEVICE} with Llama-3.1-8B, derived", "replicas": NUM_REPLICAS, "max_step_tokens": 2_048}
APPROXIMATIONS = (
    *COMMON_APPROXIMATIONS,
    "One ingress, whose index and ledger hear of a step when it ends (routers that read them).",
    "cache-aware and prefix-affinity match KV blocks where their originals match characters, and lbgr-published counts "
    "tokens where its original counts characters (their rows).",
    f"KV blocks hold {LONG_BLOCK_TOKENS} tokens (longdoc, trace).",
    "Chat is an open loop: turns come at fixed times, and only prompts, not answers, are hit again (chat).",
)


def _chat_cases(options: Options) -> list[Case]:
    return each(chat_scenarios(options), EVERY_ROUTER)


def _longdoc_cases(options: Options) -> list[Case]:
    return each(longdoc_scenarios(options), EVERY_ROUTER)


def _trace_cases(options: Options) -> list[Case]:
    return each(trace_scenarios(options), EVERY_ROUTER)


EXPERIMENTS = tuple(
    Experiment(name, DESCRIPTIONS[name], cases, targets, APPROXIMATIONS, {**PARAMETERS, **parameters})
    for name, cases, targets, parameters in (
        (
            "gsp",
            gsp_cases,
            default_over_all,
            {"rates_per_s": RATES_PER_S, "ideal_hit_rate": GSP.ideal_hit_rate},
        ),
        (
            "chat",
            _chat_cases,
            default_over_all,
            {"clients_per_s": CHAT_RATES},
        ),
        (
            "longdoc",
            _longdoc_cases,
            default_over_all,
            {"rates_per_s": LONGDOC_RATES},
        ),
        (
            "trace",
            _trace_cases,
            default_over_all,
            {"device": "h200 with Llama-3.1-8B, derived", "rate_multiplier": TRACE_RATES, "output_tokens": 64},
        ),
        (
            "sweep",
            sweep_cases,
            lambda rows: [],
            {"base": "gsp with 8 prompts a group at 12 requests a second"},
        ),
        (
            "joint",
            joint_cases,
            all_over_pairs,
            {},
        ),
        (
            "defaults",
            defaults_cases,
            lambda rows: [],
            {},
        ),
        (
            "faults",
            fault_cases,
            parity,
            {"fault_at_s": FAULT_AT_S, "restart_s": FAULT_FOR_S},
        ),
    )
)
