"""How many requests a second of wasted prefill delays, from what was assigned lately.

Work that is done twice keeps a replica busy for longer, and whoever arrives before its queue has drained waits for it.
A queue of u seconds drains in u / (1 - rho) when rho seconds of work arrive a second, and lambda * u / (1 - rho)
requests arrive meanwhile (Hyytia, Penttinen, Aalto, "Size- and state-aware dispatching problem with queue-specific job
sizes", EJOR 2012: the derivative of an M/G/1 queue's relative value). With the queue that is usual at that load, with
its service, u = service / (1 - rho):

    pressure = rho / (1 - rho)**2

The usual queue and not the one of the moment: that one makes the price highest just when a queue has grown and wants to
be spread (measured: P99 a quarter higher). One figure for all replicas, since what is wasted on one is spread over all
by those who then avoid it. Pure; O(1) an assignment.
"""

import math

MEMORY_S = 60.0
"""Time constant of rho: hundreds of requests on a busy cluster, and short beside a traffic's changes."""
LEAST_HISTORY_S = 5.0
"""A shorter history is taken over this time, so that the first requests are no flood."""
MOST = 640.0
"""Bound of the pressure, reached at a load of 0.96: in overload the formula has no end, the overload has."""


class Pressure:
    """Assigned seconds of work, fading exponentially. A clock that goes back counts as standing still."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._at_s = -math.inf
        self._seconds = 0.0

    def assigned(self, service_s: float, now_s: float) -> None:
        """A request of so many seconds of prefill was assigned to some replica."""
        if self._since_s is None:
            self._since_s = self._at_s = now_s
        now_s = max(now_s, self._at_s)
        self._seconds = self._seconds * self._fade(now_s) + service_s
        self._at_s = now_s

    def load(self, num_replicas: int, now_s: float) -> float:
        """rho: seconds of work assigned to a replica in each second; 0 before the first assignment.

        Args: num_replicas: at least 1.
        """
        if self._since_s is None:
            return 0.0
        now_s = max(now_s, self._at_s)
        history_s = max(LEAST_HISTORY_S, now_s - self._since_s)
        memory_s = MEMORY_S * -math.expm1(-history_s / MEMORY_S)
        return self._seconds * self._fade(now_s) / memory_s / num_replicas

    def value(self, num_replicas: int, now_s: float) -> float:
        """Requests delayed by a second of wasted work, 0 to `MOST`. Args: num_replicas: at least 1."""
        rho = self.load(num_replicas, now_s)
        return MOST if rho >= 1.0 else min(MOST, rho / (1.0 - rho) ** 2)

    def _fade(self, now_s: float) -> float:
        return math.exp(-(now_s - self._at_s) / MEMORY_S)
