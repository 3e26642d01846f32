"""How many replicas the queued prefill work needs: Serve's `autoscaling_config.policy`.

    needed = ceil(queued_s / target_queued_s)

`queued_s` is the expected prefill seconds of all requests that have not produced a token yet. Every replica records its
own share under `QUEUED_PREFILL_STAT` (`record_autoscaling_stats`); Serve averages it over `look_back_period_s`. A
deployment that records nothing is scaled on ongoing requests against Serve's own `target_ongoing_requests`, by the same
rule.

Serve ships this module by value into its controller, so it imports nothing but the standard library. What Serve adds
around the answer: `upscale_delay_s` and `downscale_delay_s`, and the bounds once more. Serve picks which replica goes.
"""

import math
from typing import Any

QUEUED_PREFILL_STAT = "fairway_queued_prefill_s"
"""Key under which a replica records its queued prefill work, seconds."""
HOLD_SHARE = 0.7
"""A replica is given up only when the others would then stand at no more than this share of the target."""
GROWTH = 2
"""At most so many times the running replicas at once, so that one burst can't ask for a whole cluster."""


def desired_replicas(queued_s: float, running: int, minimum: int, maximum: int, target_queued_s: float) -> int:
    """Replicas wanted for the work that waits; pure, O(1).

    Up to what the work needs but at most `GROWTH` times the running ones; down by one, and only when the rest would
    hold the work at `HOLD_SHARE` of the target; always within the bounds.

    Args:
        queued_s: seconds of prefill work that wait in all replicas together, at least 0.
        running: replicas that serve now, at least 1.
        minimum: least replicas, at least 0.
        maximum: most replicas, at least `minimum` and 1.
        target_queued_s: seconds of queued work that one replica should hold, above 0.

    Raises:
        ValueError: names the argument that is out of range, and its value.
    """
    if not 0 <= queued_s < math.inf:
        raise ValueError(f"queued_s must be finite and at least 0, got {queued_s}")
    if running < 1:
        raise ValueError(f"running must be at least 1, got {running}")
    if not 0 <= minimum <= maximum or maximum < 1:
        raise ValueError(
            f"minimum={minimum} must be at least 0 and at most maximum={maximum}, which must be at least 1"
        )
    _check_target(target_queued_s)
    needed = math.ceil(min(queued_s / target_queued_s, GROWTH * running))
    if needed > running:
        wanted = needed
    elif queued_s <= HOLD_SHARE * target_queued_s * (running - 1):
        wanted = running - 1
    else:
        wanted = running
    return max(minimum, min(maximum, wanted))


class ReplicasForQueuedWork:
    """The policy as Serve wants it: made once a deployment with `policy_kwargs`, then called with each context.

    A class because Serve gives `policy_kwargs` to nothing else.
    """

    def __init__(self, target_queued_s: float) -> None:
        """Args: target_queued_s: seconds of queued work a replica, above 0. Raises: ValueError: otherwise."""
        _check_target(target_queued_s)
        self._target_queued_s = target_queued_s

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Replicas wanted, and no state to keep.

        Args:
            ctx: `ray.serve.config.AutoscalingContext`.

        While no replica runs there is nothing to measure, so the count that Serve aims at already stays.
        """
        if ctx.current_num_replicas < 1:
            return ctx.target_num_replicas, {}
        queued_s = _recorded_s(ctx)
        work, target = (queued_s, self._target_queued_s) if queued_s is not None else _ongoing(ctx)
        lowest, highest = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return desired_replicas(work, ctx.current_num_replicas, lowest, max(1, highest), target), {}


def _check_target(target_queued_s: float) -> None:
    if not 0 < target_queued_s < math.inf:
        raise ValueError(f"target_queued_s must be finite and above 0, got {target_queued_s}")


def _recorded_s(ctx: Any) -> float | None:
    """Queued seconds over the replicas that recorded any; None when none of them did, or none usable."""
    recorded = (ctx.aggregated_metrics or {}).get(QUEUED_PREFILL_STAT, {}).values()
    usable = [value for value in recorded if 0 <= value < math.inf]
    return math.fsum(usable) if usable else None


def _ongoing(ctx: Any) -> tuple[float, float]:
    """Ongoing requests and Serve's target of them for one replica."""
    return max(0.0, ctx.total_num_requests), ctx.config.get_target_ongoing_requests()
