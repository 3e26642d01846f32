"""The engine's policies: the order of the waiting queue and the eviction of KV blocks.

Pure, except for `vllm_hooks`, which is imported by vLLM alone.
"""

from serve_app.policies.eviction import FreeBlocks, LruFreeBlocks, RltFreeBlocks
from serve_app.policies.fairway import FairwayParams, waiting_order
from serve_app.policies.orderings import ORDERINGS, Ordering, fcfs, lpm, order_within_classes
from serve_app.policies.prefill_profile import PrefillProfile

__all__ = [
    "ORDERINGS",
    "FairwayParams",
    "FreeBlocks",
    "LruFreeBlocks",
    "Ordering",
    "PrefillProfile",
    "RltFreeBlocks",
    "fcfs",
    "lpm",
    "order_within_classes",
    "waiting_order",
]
