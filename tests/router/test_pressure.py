"""The price of wasted work: by the formula on steady traffic, bounded in overload, 0 at rest."""

import math
import random

import pytest

from serve_app.router.pressure import MOST, Pressure


def steady(per_s: float, service_s: float, for_s: float, seed: int = 0) -> Pressure:
    pressure, rng, now_s = Pressure(), random.Random(seed), 0.0
    while (now_s := now_s + rng.expovariate(per_s)) < for_s:
        pressure.assigned(service_s, now_s)
    return pressure


def test_nobody_is_delayed_before_the_first_request_and_long_after_the_last() -> None:
    assert Pressure().value(4, 100.0) == 0.0
    assert steady(8.0, 0.3, 60.0).value(4, 3_600.0) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("per_s", "service_s"), [(8.0, 0.25), (4.0, 0.5), (2.0, 0.1)])
def test_load_is_the_work_a_second_and_replica(per_s: float, service_s: float) -> None:
    loads = [steady(per_s, service_s, 300.0, seed).load(4, 300.0) for seed in range(20)]
    assert math.fsum(loads) / 20 == pytest.approx(per_s * service_s / 4, rel=0.05)


def test_value_follows_the_formula_and_rises_without_end_only_up_to_its_bound() -> None:
    for per_s in (4.0, 8.0, 12.0, 13.0):
        pressure = steady(per_s, 0.25, 300.0)
        rho = pressure.load(4, 300.0)
        assert pressure.value(4, 300.0) == pytest.approx(min(MOST, rho / (1 - rho) ** 2))
    assert steady(100.0, 1.0, 120.0).value(4, 120.0) == MOST


def test_more_replicas_are_under_less_pressure() -> None:
    pressure = steady(10.0, 0.3, 120.0)
    assert pressure.value(4, 120.0) > 4 * pressure.value(8, 120.0) > 0.0


def test_first_requests_are_no_flood() -> None:
    pressure = Pressure()
    for number in range(3):
        pressure.assigned(0.3, 1e-3 * number)
    assert pressure.value(4, 3e-3) < 0.1


def test_clock_that_goes_back_changes_nothing() -> None:
    pressure = steady(8.0, 0.3, 60.0)
    before = pressure.value(4, 60.0)
    assert pressure.value(4, 30.0) == pressure.value(4, 59.0) == pytest.approx(before, rel=0.05)
    pressure.assigned(0.3, 30.0)
    assert pressure.value(4, 60.0) == pytest.approx(before, rel=0.1)
