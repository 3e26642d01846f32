"""Reading and changing the policy of a running engine, from the process in front of it.

vLLM's engine core runs utilities by name, between two steps: a method of `EngineCore`. Ours are attached when
the scheduler is made. In front of it:

    await client.engine_core.call_utility_async("fairway_change_policy", {"fast_weight": 8.0})
"""

from typing import Any

from vllm.v1.engine.core import EngineCore

from serve_app.policies.live_names import CHANGE_POLICY, POLICY_STATS

__all__ = ["CHANGE_POLICY", "POLICY_STATS", "attach"]


def fairway_change_policy(core: EngineCore, changes: dict[str, Any]) -> dict[str, Any]:
    """Set fields of the policy otherwise from the next step on; an idle engine does so at once.

    Returns: `policy_stats` with them in force.
    Raises ValueError, which vLLM carries to the caller, naming what is wrong.
    """
    core.scheduler.change_policy(changes)
    return fairway_policy_stats(core)


def fairway_policy_stats(core: EngineCore) -> dict[str, Any]:
    """The policy in force and what it has to do with; see `FairwayScheduler.policy_stats`."""
    stats: dict[str, Any] = core.scheduler.policy_stats()
    return stats


def attach() -> None:
    """Make both utilities of the engine core."""
    setattr(EngineCore, CHANGE_POLICY, fairway_change_policy)
    setattr(EngineCore, POLICY_STATS, fairway_policy_stats)
