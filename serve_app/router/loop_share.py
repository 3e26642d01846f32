"""A bound on how long background work holds up an event loop that also answers requests."""

import asyncio


class LoopShare:
    """Lets tasks do at most so much work between two turns of their loop, all tasks together, first come first served.

    Work is counted in units that the caller chooses; one `take` may overdraw, and the next ones then wait.
    """

    def __init__(self, units_a_turn: int) -> None:
        """Raises ValueError when units_a_turn is not at least 1."""
        if units_a_turn < 1:
            raise ValueError(f"units_a_turn must be at least 1, got {units_a_turn}")
        self._most = self._left = units_a_turn
        self._gate = asyncio.Lock()

    async def take(self, units: int) -> None:
        """Wait until this turn has room, then count the units: call it right before the work."""
        async with self._gate:
            if self._left <= 0:
                await asyncio.sleep(0)
                self._left = self._most
            self._left -= units
