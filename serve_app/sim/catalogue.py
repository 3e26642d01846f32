"""The experiments by name, in one sentence each: what can be said without loading the simulator."""

from collections.abc import Mapping
from types import MappingProxyType

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "dynamic": "Calm, burst and a spike over capacity, in four families of traces, under every ordering.",
        "scenarios": "Three loads of filings, mixed lengths, multi-hop questions and agents, under every ordering.",
        "flood": "A backlog of 20 misses, then a flood of hits for 60 s: who pays, and how much?",
        "ablation": "Fairway's lanes and numbers, and those of our own ordering, one at a time.",
        "long-prefill": "A prompt of 100,000 tokens runs and a short one comes every 100 ms: who pays for whom?",
        "weak-spot": "Persistent overload where a hit is only slightly cheaper than a miss, for 300 s.",
        "decode": "The filing trace with 64 and 256 output tokens: TTFT and TPOT under every ordering.",
        "evict-worst": "Groups visited in turn, LRU's worst case, on caches up to one round, under every eviction.",
        "evict-mixed": "Every eviction in random and grouped order, a sliding working set, and recorded traces.",
        "evict-protect": "Keeping the blocks that waiting requests would hit, on and off, under FCFS and Fairway.",
        "gsp": "Generated shared prefixes in random order: every router, eviction and ordering.",
        "chat": "Multi-turn chat, 2 to 8 turns of 1,024 new tokens, 64 output tokens, under every router.",
        "longdoc": "Questions about 512 long documents, three each, in random order, under every router.",
        "trace": "Mooncake's recorded conversation and synthetic traces, 1,200 requests each, under every router.",
        "sweep": "One thing changed at a time: replicas, rate, cache, output, sharing, order, late news, weights.",
        "joint": "Each decision alone, each pair, and all three together, on every workload of several replicas.",
        "defaults": "All defaults together against our router with the published parts inside, and against neither.",
        "faults": "Two replicas, nothing to share, a replica restarted cold in mid-trace, a replica half as fast.",
    }
)
"""In the order of `--list`: the waiting queue, eviction, routing."""
