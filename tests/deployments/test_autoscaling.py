"""Scaling on queued prefill seconds: the arithmetic against a slow reference, the policy inside Serve's own wrapper."""

import inspect
import math
import random
from fractions import Fraction
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from serve_app.deployments import autoscaling
from serve_app.deployments.autoscaling import QUEUED_PREFILL_STAT, ReplicasForQueuedWork, desired_replicas
from serve_app.deployments.engine_config import AUTOSCALING


def reference(queued_s: Fraction, running: int, minimum: int, maximum: int, target_queued_s: Fraction) -> int:
    """The rule in words, by counting up and exact fractions."""
    enough = 0
    while enough * target_queued_s < queued_s and enough < 2 * running:
        enough += 1
    rest_holds = queued_s <= Fraction(7, 10) * target_queued_s * (running - 1)
    wanted = enough if enough > running else running - 1 if rest_holds else running
    return sorted((minimum, wanted, maximum))[1]


def test_desired_replicas_equals_the_reference_on_random_work() -> None:
    rng = random.Random(11)
    for _ in range(20_000):
        minimum, running = rng.randint(0, 4), rng.randint(1, 12)
        maximum = rng.randint(max(1, minimum), 12)
        target_s = rng.choice([0.5, 1.0, 2.0, 8.0])
        # Quarter seconds are exact in binary; at those the two ways to write 0.7 * target agree on every boundary.
        queued_s = rng.randint(0, 4 * 30) / 4
        expected = reference(Fraction(queued_s), running, minimum, maximum, Fraction(target_s))
        assert desired_replicas(queued_s, running, minimum, maximum, target_s) == expected


def test_one_step_at_most_doubles_and_gives_up_at_most_one() -> None:
    assert [desired_replicas(1e9, running, 1, 10, 2.0) for running in (1, 2, 4, 8)] == [2, 4, 8, 10]
    assert [desired_replicas(0.0, running, 1, 10, 2.0) for running in (10, 2, 1)] == [9, 1, 1]


def test_work_beyond_any_float_quotient_still_only_doubles() -> None:
    assert desired_replicas(1e308, 3, 1, 10, 1e-300) == 6


def test_a_replica_is_kept_while_the_others_would_stand_above_the_hold_share() -> None:
    assert desired_replicas(4.21, 4, 1, 10, 2.0) == 4
    assert desired_replicas(4.19, 4, 1, 10, 2.0) == 3


def test_steady_work_reaches_a_fixed_point_and_stays_there() -> None:
    for tenths in range(0, 250, 7):
        running, seen = 1, []
        for _ in range(20):
            running = desired_replicas(tenths / 10, running, 1, 10, 2.0)
            seen.append(running)
        assert len(set(seen[-10:])) == 1, (tenths, seen)


def test_more_work_never_wants_fewer_replicas() -> None:
    for running in range(1, 11):
        wanted = [desired_replicas(tenths / 10, running, 1, 10, 1.5) for tenths in range(300)]
        assert wanted == sorted(wanted)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((-1.0, 1, 1, 10, 2.0), "queued_s must be finite and at least 0, got -1.0"),
        ((math.nan, 1, 1, 10, 2.0), "queued_s"),
        ((0.0, 0, 1, 10, 2.0), "running must be at least 1, got 0"),
        ((0.0, 1, 5, 4, 2.0), "minimum=5"),
        ((0.0, 1, 0, 0, 2.0), "maximum=0"),
        ((0.0, 1, 1, 10, 0.0), "target_queued_s must be finite and above 0, got 0.0"),
    ],
)
def test_an_argument_out_of_range_is_named_with_its_value(arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        desired_replicas(*arguments)


def context(
    queued_s: dict[str, float] | None, ongoing: float = 0.0, current: int = 2, target: int = 2, **config: Any
) -> AutoscalingContext:
    """What Serve's controller passes, with per-replica statistics where given."""
    deployment = DeploymentID(name="engine", app_name="fairway")
    metrics = {name: {ReplicaID(name, deployment): value} for name, value in (queued_s or {}).items()}
    merged = {replica: value for one in metrics.values() for replica, value in one.items()}
    settings = AutoscalingConfig(**{"min_replicas": 1, "max_replicas": 10, "target_ongoing_requests": 4, **config})
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name="engine",
        app_name="fairway",
        current_num_replicas=current,
        target_num_replicas=target,
        running_replicas=[],
        total_num_requests=lambda: ongoing,
        total_queued_requests=0.0,
        aggregated_metrics=lambda: {QUEUED_PREFILL_STAT: merged} if queued_s is not None else {},
        raw_metrics=None,
        capacity_adjusted_min_replicas=settings.min_replicas,
        capacity_adjusted_max_replicas=settings.max_replicas,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=settings,
    )


def test_policy_adds_up_the_seconds_that_replicas_recorded() -> None:
    policy = ReplicasForQueuedWork(target_queued_s=2.0)
    assert policy(context({"a": 3.0, "b": 2.5}, ongoing=1_000.0)) == (3, {})


def test_policy_goes_by_ongoing_requests_when_no_replica_records_seconds() -> None:
    policy = ReplicasForQueuedWork(target_queued_s=2.0)
    assert policy(context(None, ongoing=12.0)) == (3, {})
    assert policy(context(None, ongoing=0.0)) == (1, {})


def test_policy_skips_a_broken_statistic_and_keeps_the_rest() -> None:
    policy = ReplicasForQueuedWork(target_queued_s=2.0)
    assert policy(context({"a": math.nan, "b": 7.0, "c": -1.0})) == (4, {})
    assert policy(context({"a": math.nan}, ongoing=12.0)) == (3, {})


def test_policy_keeps_the_aim_while_no_replica_runs() -> None:
    assert ReplicasForQueuedWork(target_queued_s=2.0)(context({}, current=0, target=3)) == (3, {})


def test_serve_makes_the_policy_from_its_dotted_name_and_passes_the_target() -> None:
    shipped = AutoscalingPolicy(policy_function=AUTOSCALING, policy_kwargs={"target_queued_s": 0.5})
    assert inspect.isclass(shipped.get_policy()), "Serve ignores policy_kwargs of a plain function"
    assert _resolve_policy_callable(shipped)(context({"a": 2.0}))[0] == 4


def test_serve_refuses_an_unknown_policy_argument() -> None:
    shipped = AutoscalingPolicy(policy_function=AUTOSCALING, policy_kwargs={"target_seconds": 0.5})
    with pytest.raises(TypeError, match="target_seconds"):
        _resolve_policy_callable(shipped)


def test_serve_waits_out_its_delays_before_it_follows_the_policy() -> None:
    from ray.serve.autoscaling_policy import _apply_autoscaling_config

    decide = _apply_autoscaling_config(ReplicasForQueuedWork(target_queued_s=2.0))
    assert decide(context({"a": 8.0}, upscale_delay_s=0.0))[0] == 4
    assert decide(context({"a": 8.0}, upscale_delay_s=60.0))[0] == 2
    assert decide(context({"a": 0.0}, downscale_delay_s=0.0))[0] == 1
    assert decide(context({"a": 0.0}, downscale_delay_s=60.0))[0] == 2


def test_module_needs_only_the_standard_library_because_serve_ships_it_by_value() -> None:
    imported = {line.split()[1] for line in inspect.getsource(autoscaling).splitlines() if line.startswith("from ")}
    assert imported == {"typing"}
