"""vLLM's scheduler and block pool with our policies inside; the only folder here that imports vLLM.

Chosen by vLLM's own arguments, in `vllm serve` as under Ray:

    scheduler_cls="serve_app.policies.vllm_hooks.FairwayScheduler"
    additional_config={"fairway": {...fields of serve_app.config.EnginePolicy...}}

Each hook reads numbers off requests or blocks, calls the pure policy and applies its answer; vLLM's own `schedule` and
allocation run unchanged. What is touched of vLLM is named in tests/policies/test_vllm_contract.py.
"""

from serve_app.policies.vllm_hooks.block_pool import PolicyBlockPool
from serve_app.policies.vllm_hooks.prefix_lookup import CachedPrefixes
from serve_app.policies.vllm_hooks.scheduler import FairwayScheduler
from serve_app.policies.vllm_hooks.waiting_queue import OrderedWaitingQueue
from serve_app.policies.vllm_hooks.waiting_requests import WaitingRequests

__all__ = ["CachedPrefixes", "FairwayScheduler", "OrderedWaitingQueue", "PolicyBlockPool", "WaitingRequests"]
