"""Expected prefill seconds, from a table that was measured once per device and model.

F(n) is the cold prefill time of n tokens: piecewise linear through the table, from `base_s` at 0 tokens, and beyond the
last entry with the slope of `slope_beyond`. Prefilling `todo` tokens on top of `context` cached ones should take

    base_s + F(context + todo) - F(context)

so that a cold prompt costs exactly what the table says, and a prompt that is all cached costs `base_s`. Source: ours.
Cost: O(log k) a number for a table of k entries.
"""

from bisect import bisect_right
from typing import Protocol

import numpy as np

from serve_app.config import PrefillTable
from serve_app.policies.fairway import FloatArray, IntArray


class ExpectedPrefill(Protocol):
    """What a policy asks: a measured `PrefillProfile`, or `online_prefill.OnlinePrefill` where nobody measured."""

    @property
    def table(self) -> PrefillTable:
        """What the answers rest on."""

    def prefill_s(self, todo_tokens: IntArray, context_tokens: IntArray | int = 0) -> FloatArray:
        """Seconds to prefill `todo_tokens` (n,) on top of `context_tokens` (n,) cached ones; never falls in them."""

    def prefill_s_one(self, todo_tokens: float, context_tokens: float = 0.0) -> float:
        """`prefill_s` of one request."""

    def hit_s(self, hit_tokens: float) -> float:
        """Seconds that `hit_tokens` cached tokens still cost."""


class PrefillProfile:
    """Interpolates one `PrefillTable`; never falls in `todo_tokens`, never below `base_s`."""

    def __init__(self, table: PrefillTable) -> None:
        self.table = table
        # A base above the first entry (noise) must not make F fall.
        self._knots = [0.0, *map(float, table.tokens)]
        self._values = [min(table.base_s, table.seconds[0]), *table.seconds]
        rises = np.diff(self._values) / np.diff(self._knots)
        self._slopes: list[float] = [*rises.tolist(), slope_beyond(table)]

    @classmethod
    def flat(cls, tokens_per_s: float = 10_000.0) -> "PrefillProfile":
        """A profile for an unmeasured device: the same speed at every length. Raises ValueError unless above 0."""
        if not tokens_per_s > 0:
            raise ValueError(f"tokens_per_s is {tokens_per_s}; it must be above 0")
        table = PrefillTable(
            device="any",
            model="any",
            dtype="any",
            vllm_version="any",
            date="",
            derived=f"assumed {tokens_per_s:g} tokens/s",
            tokens=(1, 2),
            seconds=(1 / tokens_per_s, 2 / tokens_per_s),
        )
        return cls(table)

    def prefill_s(self, todo_tokens: IntArray, context_tokens: IntArray | int = 0) -> FloatArray:
        """Seconds to prefill `todo_tokens` (n,) on top of `context_tokens` (n,) cached ones, or one number; all >= 0.

        Returns: (n,).
        """
        rise_s = self._cold_s(todo_tokens + context_tokens) - self._cold_s(np.asarray(context_tokens))
        # F never falls, but its floating-point values may, by a last digit.
        seconds: FloatArray = self.table.base_s + np.maximum(rise_s, 0.0)
        return seconds

    def prefill_s_one(self, todo_tokens: float, context_tokens: float = 0.0) -> float:
        """`prefill_s` of one request, without numpy."""
        rise_s = self._cold_s_one(context_tokens + todo_tokens) - self._cold_s_one(context_tokens)
        return self.table.base_s + max(rise_s, 0.0)

    def hit_s(self, hit_tokens: float) -> float:
        """Seconds that `hit_tokens` cached tokens still cost."""
        return self.table.hit_s_per_token * hit_tokens

    def _cold_s(self, tokens: IntArray) -> FloatArray:
        inside = np.interp(tokens, self._knots, self._values)
        beyond = np.maximum(tokens - self._knots[-1], 0.0)
        cold: FloatArray = inside + self._slopes[-1] * beyond
        return cold

    def _cold_s_one(self, tokens: float) -> float:
        segment = bisect_right(self._knots, tokens) - 1
        return self._values[segment] + self._slopes[segment] * (tokens - self._knots[segment])


def slope_beyond(table: PrefillTable) -> float:
    """Seconds a token beyond the table's last entry, never negative.

    The last segment's slope, held between the mean slope from the first entry to the last and twice that. One segment
    alone may be flat (noise that the running maximum cut) or steep (two entries close together, a step more in the
    second). A prefill of n tokens costs a + b n + c n^2 with none of them negative (a constant, the tokens, attention),
    so that between lengths m < n the slope is b + c (m + n): at the end of a table it is at least the mean slope, and
    less than twice that.
    """
    (before, last), (before_s, last_s) = table.tokens[-2:], table.seconds[-2:]
    mean = (last_s - table.seconds[0]) / (last - table.tokens[0])
    return min(max((last_s - before_s) / (last - before), mean), 2.0 * mean)
