"""What an engine reports is a floor that fades, and is forgotten with the replica."""

import math

import pytest

from serve_app.router.load_reports import HALF_LIFE_S, TOO_OLD_S, LoadReports


def test_floor_is_the_last_report_faded_by_its_age() -> None:
    reports = LoadReports()
    reports.heard("a", 8.0, age_s=HALF_LIFE_S, now_s=100.0)
    assert reports.floor_s("a", 100.0) == pytest.approx(4.0)
    assert reports.floor_s("a", 100.0 + HALF_LIFE_S) == pytest.approx(2.0)
    reports.heard("a", 0.0, age_s=0.0, now_s=102.0)
    assert reports.floor_s("a", 102.0) == 0.0


def test_replica_that_said_nothing_or_nothing_lately_has_no_floor() -> None:
    reports = LoadReports()
    assert reports.floor_s("a", 0.0) == 0.0
    reports.heard("a", 1e9, age_s=0.0, now_s=0.0)
    assert reports.floor_s("a", TOO_OLD_S + 0.1) == 0.0


def test_clock_that_goes_back_counts_as_standing_still() -> None:
    reports = LoadReports()
    reports.heard("a", 8.0, age_s=0.0, now_s=100.0)
    assert reports.floor_s("a", 50.0) == 8.0


def test_departed_replica_is_forgotten() -> None:
    reports = LoadReports()
    reports.heard("a", 8.0, age_s=0.0, now_s=0.0)
    reports.forget("a")
    reports.forget("never seen")
    assert reports.floor_s("a", 0.0) == 0.0
    assert reports.replica_ids() == set()


@pytest.mark.parametrize(("name", "value"), [("seconds", -1.0), ("seconds", math.nan), ("age_s", math.inf)])
def test_numbers_out_of_bounds_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        LoadReports().heard("a", **{"seconds": 1.0, "age_s": 0.0, name: value}, now_s=0.0)
