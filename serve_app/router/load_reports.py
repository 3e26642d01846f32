"""What engines say of their own queues: a floor under the ledger.

The ledger knows what the ingresses assigned. An engine also serves what did not come through them, and what they lost
count of, so a replica is taken to have at least the work that it last reported:

    load(r) = max(ledger(r), reported seconds(r) * 2 ** (-age / `HALF_LIFE_S`))

A floor only, because a report is older than the newest reservations: it must never take back what they hold, or a burst
would herd onto the replica that reported first.
"""

import math
from dataclasses import dataclass

HALF_LIFE_S = 1.0
"""A busy engine reports several times a second; what it said fades when it falls silent."""
TOO_OLD_S = 30.0
"""Older reports count for nothing, so that a silent replica ends at exactly 0."""


@dataclass(frozen=True, slots=True)
class _Report:
    seconds: float
    at_s: float


class LoadReports:
    """The last report of each replica, in seconds of one clock that the caller chooses."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}

    def heard(self, replica_id: str, seconds: float, age_s: float, now_s: float) -> None:
        """The replica said, `age_s` ago, that so many seconds of prefill wait in its queue.

        Raises:
            ValueError: seconds or age_s is negative or not finite.
        """
        for name, value in (("seconds", seconds), ("age_s", age_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and at least 0")
        self._reports[replica_id] = _Report(seconds, now_s - age_s)

    def forget(self, replica_id: str) -> None:
        """The replica is gone or has restarted."""
        self._reports.pop(replica_id, None)

    def floor_s(self, replica_id: str, now_s: float) -> float:
        """Least seconds of work on the replica; 0.0 when it has not said so lately."""
        report = self._reports.get(replica_id)
        if report is None or not report.seconds:
            return 0.0
        age_s = max(0.0, now_s - report.at_s)
        return 0.0 if age_s > TOO_OLD_S else report.seconds * float(2.0 ** (-age_s / HALF_LIFE_S))

    def replica_ids(self) -> set[str]:
        """Replicas whose report is kept."""
        return set(self._reports)
