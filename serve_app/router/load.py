"""The ledger of work assigned to each replica, in seconds of expected service.

    load(r, t) = sum over r's open reservations i of service_i * 2 ** (-(t - t_i) / half_life)

from the moment t_i of the reservation; prefill done makes the term 0, release removes it. All reservations share one
half-life, so one decayed sum a replica is enough: every operation is O(1). What floating point leaves over is thrown
away whenever a replica has no work left, so idle is exactly 0.0. Source: the decayed load of LBGR, in seconds, with
release.
"""

from collections.abc import Set
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Reservation:
    replica_id: str
    service_s: float
    at_s: float
    """When `service_s` was the whole of what was left; the reservation's own time until the half-life changes."""
    opened_at_s: float
    has_work: bool = True


@dataclass(slots=True)
class _Account:
    """One replica: its open reservations and their decayed sum, `load_s` as of `at_s`."""

    open_ids: dict[str, None] = field(default_factory=dict)
    num_working: int = 0
    load_s: float = 0.0
    at_s: float = float("-inf")


class LoadLedger:
    """Reservations by request id, each released exactly once. A clock that goes back counts as standing still."""

    def __init__(self, half_life_s: float) -> None:
        """Args: half_life_s: above 0. Raises: ValueError: otherwise."""
        self._accounts: dict[str, _Account] = {}
        self._open: dict[str, _Reservation] = {}
        self._half_life_s = _positive(half_life_s)
        self.num_reserved = 0
        """Reservations ever made."""
        self.num_released = 0
        """Reservations ever released; `num_reserved - num_released` are open."""

    @property
    def half_life_s(self) -> float:
        """Seconds after which half of an assignment is assumed to be done, without any report."""
        return self._half_life_s

    @half_life_s.setter
    def half_life_s(self, half_life_s: float) -> None:
        """Change the decay from each replica's last operation on; what had decayed by then stays decayed. O(open)."""
        new = _positive(half_life_s)
        for account in self._accounts.values():
            for request_id in account.open_ids:
                one = self._open[request_id]
                one.service_s = self._left_s(one, account.at_s)
                one.at_s = account.at_s
        self._half_life_s = new

    def reserve(self, request_id: str, replica_id: str, service_s: float, now_s: float) -> bool:
        """Open a reservation; False, and nothing changes, when the id is open already.

        Raises:
            ValueError: service_s is negative or not finite.
        """
        if not 0 <= service_s < float("inf"):
            raise ValueError(f"service_s must be finite and at least 0, got {service_s}")
        if request_id in self._open:
            return False
        account = self._accounts.setdefault(replica_id, _Account())
        self._advance(account, now_s)
        self._open[request_id] = _Reservation(replica_id, service_s, account.at_s, account.at_s)
        account.open_ids[request_id] = None
        account.num_working += 1
        account.load_s += service_s
        self.num_reserved += 1
        return True

    def prefill_done(self, request_id: str, now_s: float) -> bool:
        """The request's work is done and it stays open (it decodes); False when it is not open or had none left."""
        one = self._open.get(request_id)
        if one is None or not one.has_work:
            return False
        self._take_work(one, now_s)
        return True

    def release(self, request_id: str, now_s: float) -> bool:
        """Close the reservation and take back what is left of it; False when it is not open."""
        one = self._open.pop(request_id, None)
        if one is None:
            return False
        if one.has_work:
            self._take_work(one, now_s)
        account = self._accounts[one.replica_id]
        del account.open_ids[request_id]
        if not account.open_ids:
            del self._accounts[one.replica_id]
        self.num_released += 1
        return True

    def release_replica(self, replica_id: str) -> list[str]:
        """The replica is gone: release all of its reservations and return their ids."""
        account = self._accounts.pop(replica_id, None)
        gone = list(account.open_ids) if account else []
        for request_id in gone:
            del self._open[request_id]
        self.num_released += len(gone)
        return gone

    def release_orphans(self, replica_id: str, known_ids: Set[str], older_than_s: float, now_s: float) -> list[str]:
        """Release reservations at least `older_than_s` old that the replica itself does not know; returns their ids."""
        orphans = [
            request_id
            for request_id in self.open_ids(replica_id) - known_ids
            if now_s - self._open[request_id].opened_at_s >= older_than_s
        ]
        for request_id in orphans:
            self.release(request_id, now_s)
        return orphans

    def load_s(self, replica_id: str, now_s: float) -> float:
        """Seconds of assigned work left on the replica; exactly 0.0 when it has none."""
        account = self._accounts.get(replica_id)
        return account.load_s * self._decay(now_s - account.at_s) if account else 0.0

    def num_open(self, replica_id: str) -> int:
        """Open reservations on the replica, decoding ones included."""
        account = self._accounts.get(replica_id)
        return len(account.open_ids) if account else 0

    def num_working(self, replica_id: str) -> int:
        """Open reservations whose prefill is not done."""
        account = self._accounts.get(replica_id)
        return account.num_working if account else 0

    def open_ids(self, replica_id: str) -> set[str]:
        """Ids of the replica's open reservations."""
        account = self._accounts.get(replica_id)
        return set(account.open_ids) if account else set()

    def replica_ids(self) -> set[str]:
        """Replicas with open reservations."""
        return set(self._accounts)

    def replica_of(self, request_id: str) -> str | None:
        """Where the request is open; None when it is not."""
        one = self._open.get(request_id)
        return one.replica_id if one else None

    def check_integrity(self, now_s: float) -> None:
        """Raise AssertionError unless sums, counts and ids agree and every reservation is open or released once."""
        assert self.num_reserved - self.num_released == len(self._open), (self.num_reserved, self.num_released)
        ids = [request_id for account in self._accounts.values() for request_id in account.open_ids]
        assert sorted(ids) == sorted(self._open), "accounts and reservations disagree"
        for replica_id, account in self._accounts.items():
            mine = [self._open[request_id] for request_id in account.open_ids]
            assert mine, f"empty account of {replica_id}"
            assert all(one.replica_id == replica_id for one in mine), replica_id
            assert account.num_working == sum(one.has_work for one in mine), replica_id
            expected_s = sum(self._left_s(one, max(now_s, account.at_s)) for one in mine)
            off_s = abs(self.load_s(replica_id, now_s) - expected_s)
            assert off_s <= 1e-9 * (1 + sum(one.service_s for one in mine)), (replica_id, off_s)
            assert account.num_working or account.load_s == 0.0, replica_id

    def _take_work(self, one: _Reservation, now_s: float) -> None:
        account = self._accounts[one.replica_id]
        self._advance(account, now_s)
        account.num_working -= 1
        account.load_s = max(0.0, account.load_s - self._left_s(one, account.at_s)) if account.num_working else 0.0
        one.has_work = False

    def _advance(self, account: _Account, now_s: float) -> None:
        if now_s > account.at_s:
            account.load_s *= self._decay(now_s - account.at_s)
            account.at_s = now_s

    def _left_s(self, one: _Reservation, at_s: float) -> float:
        return one.service_s * self._decay(at_s - one.at_s) if one.has_work else 0.0

    def _decay(self, elapsed_s: float) -> float:
        return float(2.0 ** (-max(0.0, elapsed_s) / self._half_life_s))


def _positive(half_life_s: float) -> float:
    if not 0 < half_life_s < float("inf"):
        raise ValueError(f"half_life_s must be finite and above 0, got {half_life_s}")
    return half_life_s
