"""The engine's policies: the order of the waiting queue and the eviction of KV blocks.

Pure, except for `vllm_hooks`, which is imported by vLLM alone.
"""

from serve_app.policies.eviction import FreeBlocks, LruFreeBlocks
from serve_app.policies.fairway import FairwayParams, waiting_order
from serve_app.policies.online_prefill import OnlinePrefill
from serve_app.policies.orderings import ORDERINGS, ORDERINGS_BY_ARRIVAL_ALONE, Ordering, order_within_classes
from serve_app.policies.prefill_profile import ExpectedPrefill, PrefillProfile
from serve_app.policies.rlt import RltFreeBlocks

__all__ = [
    "ORDERINGS",
    "ORDERINGS_BY_ARRIVAL_ALONE",
    "ExpectedPrefill",
    "FairwayParams",
    "FreeBlocks",
    "LruFreeBlocks",
    "OnlinePrefill",
    "Ordering",
    "PrefillProfile",
    "RltFreeBlocks",
    "order_within_classes",
    "waiting_order",
]
