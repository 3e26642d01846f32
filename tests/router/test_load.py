"""The ledger of assigned work against a reference that sums every open reservation anew."""

import random
from dataclasses import dataclass

import pytest

from serve_app.router.load import LoadLedger


@dataclass
class Open:
    replica_id: str
    left_s: float
    at_s: float
    opened_at_s: float


class SlowLedger:
    """One entry for each reservation, decayed one by one."""

    def __init__(self, half_life_s: float) -> None:
        self.half_life_s = half_life_s
        self.open: dict[str, Open] = {}

    def left_s(self, one: Open, now_s: float) -> float:
        return one.left_s * float(0.5 ** ((now_s - one.at_s) / self.half_life_s))

    def change_half_life(self, half_life_s: float, at_s: dict[str, float]) -> None:
        for one in self.open.values():
            one.left_s, one.at_s = self.left_s(one, at_s[one.replica_id]), at_s[one.replica_id]
        self.half_life_s = half_life_s

    def load_s(self, replica_id: str, now_s: float) -> float:
        return sum(self.left_s(one, now_s) for one in self.open.values() if one.replica_id == replica_id)


def test_reservation_decays_by_half_each_half_life_and_is_taken_back_whole() -> None:
    ledger = LoadLedger(half_life_s=10.0)
    assert ledger.reserve("r", "a", 8.0, now_s=0.0)
    assert ledger.load_s("a", 0.0) == 8.0
    assert ledger.load_s("a", 10.0) == pytest.approx(4.0)
    assert ledger.reserve("s", "a", 1.0, now_s=20.0)
    assert ledger.load_s("a", 20.0) == pytest.approx(3.0)
    assert ledger.release("r", 20.0)
    assert ledger.load_s("a", 20.0) == pytest.approx(1.0)
    assert ledger.release("s", 30.0)
    assert ledger.load_s("a", 30.0) == 0.0


def test_duplicate_id_is_refused_and_changes_nothing() -> None:
    ledger = LoadLedger(10.0)
    assert ledger.reserve("r", "a", 1.0, 0.0)
    assert not ledger.reserve("r", "b", 5.0, 0.0)
    assert (ledger.load_s("a", 0.0), ledger.load_s("b", 0.0)) == (1.0, 0.0)
    assert (ledger.replica_of("r"), ledger.replica_of("s")) == ("a", None)


def test_request_is_released_exactly_once() -> None:
    ledger = LoadLedger(10.0)
    ledger.reserve("r", "a", 1.0, 0.0)
    assert ledger.release("r", 1.0)
    assert not ledger.release("r", 1.0)
    assert not ledger.prefill_done("r", 1.0)
    assert (ledger.num_reserved, ledger.num_released) == (1, 1)


def test_request_stays_open_without_work_when_its_prefill_is_done() -> None:
    ledger = LoadLedger(10.0)
    ledger.reserve("r", "a", 1.0, 0.0)
    ledger.reserve("s", "a", 2.0, 0.0)
    assert ledger.prefill_done("r", 0.0)
    assert not ledger.prefill_done("r", 0.0)
    assert (ledger.load_s("a", 0.0), ledger.num_open("a"), ledger.open_ids("a")) == (2.0, 2, {"r", "s"})
    ledger.prefill_done("s", 3.0)
    assert (ledger.load_s("a", 3.0), ledger.num_open("a")) == (0.0, 2)
    ledger.check_integrity(3.0)


def test_reservations_of_a_departed_replica_are_released_together() -> None:
    ledger = LoadLedger(10.0)
    ledger.reserve("r", "a", 1.0, 0.0)
    ledger.reserve("s", "b", 1.0, 0.0)
    assert ledger.release_replica("a") == ["r"]
    assert ledger.release_replica("a") == []
    assert not ledger.release("r", 0.0)
    assert (ledger.load_s("a", 0.0), ledger.load_s("b", 0.0), ledger.replica_ids()) == (0.0, 1.0, {"b"})


def test_only_old_reservations_that_the_replica_does_not_know_are_orphans() -> None:
    ledger = LoadLedger(10.0)
    for request_id, opened_at_s in (("known", 0.0), ("old", 0.0), ("young", 9.0)):
        ledger.reserve(request_id, "a", 1.0, opened_at_s)
    ledger.reserve("elsewhere", "b", 1.0, 0.0)
    assert ledger.release_orphans("a", {"known"}, older_than_s=5.0, now_s=10.0) == ["old"]
    assert ledger.open_ids("a") == {"known", "young"}
    assert ledger.open_ids("b") == {"elsewhere"}


def test_clock_that_goes_back_counts_as_standing_still() -> None:
    ledger = LoadLedger(10.0)
    ledger.reserve("r", "a", 1.0, 100.0)
    ledger.reserve("s", "a", 1.0, 50.0)
    assert ledger.load_s("a", 60.0) == 2.0
    ledger.check_integrity(60.0)


def test_new_half_life_counts_from_the_last_operation_on() -> None:
    ledger = LoadLedger(10.0)
    ledger.reserve("r", "a", 8.0, 0.0)
    ledger.reserve("s", "a", 0.0, 10.0)
    ledger.half_life_s = 1.0
    assert ledger.half_life_s == 1.0
    assert ledger.load_s("a", 11.0) == pytest.approx(2.0)
    ledger.check_integrity(11.0)


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_agree_with_the_slow_ledger(seed: int) -> None:
    rng, now_s = random.Random(seed), 0.0
    ledger, slow, last_s = LoadLedger(3.0), SlowLedger(3.0), dict[str, float]()
    for step in range(3_000):
        now_s += rng.expovariate(5.0)
        request_id, replica_id = f"{rng.randrange(60)}", rng.choice("abc")
        one = slow.open.get(request_id)
        match rng.choices(["reserve", "done", "release", "gone", "orphans", "half-life"], [50, 20, 30, 1, 2, 1])[0]:
            case "reserve":
                service_s = rng.choice([0.0, 1e-6, rng.random(), 1e4])
                assert ledger.reserve(request_id, replica_id, service_s, now_s) == (one is None)
                if one is None:
                    slow.open[request_id] = Open(replica_id, service_s, now_s, now_s)
                    last_s[replica_id] = now_s
            case "done":
                ledger.prefill_done(request_id, now_s)
                if one is not None:
                    one.left_s = 0.0
            case "release":
                assert ledger.release(request_id, now_s) == (one is not None)
                slow.open.pop(request_id, None)
            case "gone":
                gone = {i for i, one in slow.open.items() if one.replica_id == replica_id}
                assert set(ledger.release_replica(replica_id)) == gone
                slow.open = {i: one for i, one in slow.open.items() if i not in gone}
            case "orphans":
                known = {i for i in slow.open if rng.random() < 0.5}
                orphans = set(ledger.release_orphans(replica_id, known, 1.0, now_s))
                assert orphans == {
                    i
                    for i, one in slow.open.items()
                    if one.replica_id == replica_id and i not in known and now_s - one.opened_at_s >= 1.0
                }
                slow.open = {i: one for i, one in slow.open.items() if i not in orphans}
            case "half-life":
                for name in "abc":  # an operation on every replica, so that both change at the same moment
                    ledger.reserve(f"mark {step} {name}", name, 0.0, now_s)
                slow.change_half_life(new := rng.choice([0.001, 0.5, 600.0]), dict.fromkeys("abc", now_s))
                ledger.half_life_s = new
                for name in "abc":
                    ledger.release(f"mark {step} {name}", now_s)
        for name in "abc":
            assert ledger.load_s(name, now_s) == pytest.approx(slow.load_s(name, now_s), rel=1e-6, abs=1e-7)
            assert ledger.open_ids(name) == {i for i, one in slow.open.items() if one.replica_id == name}
            assert ledger.num_open(name) == len(ledger.open_ids(name))
        ledger.check_integrity(now_s)
    for request_id in list(slow.open):
        ledger.release(request_id, now_s)
    assert [ledger.load_s(name, now_s) for name in "abc"] == [0.0, 0.0, 0.0]
    assert ledger.num_reserved == ledger.num_released


@pytest.mark.parametrize("bad_s", [-1.0, float("nan"), float("inf")])
def test_impossible_service_or_half_life_is_refused(bad_s: float) -> None:
    ledger = LoadLedger(10.0)
    with pytest.raises(ValueError, match="service_s must be finite and at least 0"):
        ledger.reserve("r", "a", bad_s, 0.0)
    with pytest.raises(ValueError, match="half_life_s must be finite and above 0"):
        ledger.half_life_s = bad_s
    with pytest.raises(ValueError, match="half_life_s must be finite and above 0"):
        LoadLedger(0.0)
    assert ledger.num_reserved == 0
