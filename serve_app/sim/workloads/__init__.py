"""The generated workloads beside `arrivals`: what is asked (families, sessions), when, and how much of it repeats."""

from serve_app.sim.workloads.documents import FilingParams, LongdocParams, longdoc
from serve_app.sim.workloads.families import FAMILIES
from serve_app.sim.workloads.mixed import MixedParams
from serve_app.sim.workloads.passages import MULTIHOP, RetrievalParams
from serve_app.sim.workloads.prefixes import HitHeavyParams, RecencyParams, WeakSpotParams
from serve_app.sim.workloads.reuse import infinite_cache_hit_rate, reusable_tokens
from serve_app.sim.workloads.sessions import AGENT_KINDS, AgentKind, AgentParams, ChatParams, Turn, agent, chat
from serve_app.sim.workloads.timing import (
    PHASES,
    DynamicParams,
    Family,
    Replayed,
    SaturatedParams,
    SteadyParams,
    dynamic,
    saturated,
    steady,
)

__all__ = [
    "AGENT_KINDS",
    "FAMILIES",
    "MULTIHOP",
    "PHASES",
    "AgentKind",
    "AgentParams",
    "ChatParams",
    "DynamicParams",
    "Family",
    "FilingParams",
    "HitHeavyParams",
    "LongdocParams",
    "MixedParams",
    "RecencyParams",
    "Replayed",
    "RetrievalParams",
    "SaturatedParams",
    "SteadyParams",
    "Turn",
    "WeakSpotParams",
    "agent",
    "chat",
    "dynamic",
    "infinite_cache_hit_rate",
    "longdoc",
    "reusable_tokens",
    "saturated",
    "steady",
]
