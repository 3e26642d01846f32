"""How far predictions were off, each scored before it was learned from: error, bias, and an interval's coverage."""

import math
from dataclasses import dataclass

from river import stats

ERROR_WINDOW = 50
"""Observations over which the reported means are taken, exponentially."""
INTERVAL_WINDOW = 200
"""Observations that set the interval's width."""
INTERVAL_SHARE = 0.9
"""Share of observations that the interval is meant to hold."""


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """Errors of the predicted TTFT, over the last observations; zeros before the first."""

    predictions: int = 0
    """Predictions scored."""
    mae_s: float = 0.0
    """Mean absolute error, seconds."""
    bias_s: float = 0.0
    """Mean of observed minus predicted, seconds."""
    interval_s: float = 0.0
    """Half-width of the interval around the next prediction that should hold `INTERVAL_SHARE` of observations."""
    coverage: float = 0.0
    """Share of the last observations that the interval of their time held."""


class ErrorTracker:
    """O(log window) an observation."""

    def __init__(self) -> None:
        self._num = 0
        self._mae_s, self._bias_s, self._coverage = FadingMean(), FadingMean(), FadingMean()
        self._width_s = stats.RollingQuantile(INTERVAL_SHARE, INTERVAL_WINDOW)

    def add(self, error_s: float) -> None:
        """Score one prediction. Args: error_s: observed minus predicted, finite."""
        if self._num:
            self._coverage.add(float(abs(error_s) <= self._interval_s()))
        self._num += 1
        self._mae_s.add(abs(error_s))
        self._bias_s.add(error_s)
        self._width_s.update(abs(error_s))

    @property
    def errors(self) -> PredictionErrors:
        """As of the last observation."""
        return PredictionErrors(
            self._num, self._mae_s.value, self._bias_s.value, self._interval_s(), self._coverage.value
        )

    def _interval_s(self) -> float:
        width_s = self._width_s.get()
        return float(width_s) if width_s is not None and math.isfinite(width_s) else 0.0


class FadingMean:
    """Mean of what was added, exponentially weighted over `ERROR_WINDOW`, right from the first value on."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num = 0

    def add(self, value: float) -> None:
        """Add one value."""
        self._num += 1
        self.value += (value - self.value) / min(self._num, ERROR_WINDOW)
