"""What the explicit terms get wrong, learned online: observed TTFT minus (miss + hit + queue seconds).

River's linear regression behind a standard scaler, one gradient step an observation, so old observations fade by
themselves. Every quantity that enters is bounded (the scaled features, the target, the gradient), so one absurd
observation moves the weights by a bounded step. The prediction is bounded too: a free residual was measured to destroy
placement at saturation, +-1 s to help. ADWIN watches the absolute error; when it rises the model starts anew. Cost: a
few microseconds to predict, tens to learn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from river import drift, linear_model, optim, preprocessing

WEIGHT_RATE = 0.02
"""Gradient step of the feature weights; with features within +-3 a step stays below the stability limit."""
INTERCEPT_RATE = 0.1
"""Gradient step of the constant: 16 observations bring it within 3 % of the truth."""
SCALED_LIMIT = 3.0
"""Scaled features are cut at so many standard deviations."""
ERROR_WINDOW = 50
"""Observations over which the reported errors are averaged, exponentially."""


@dataclass(frozen=True, slots=True)
class ResidualState:
    """Snapshot of the estimator; errors are of the whole prediction, made before each observation was learned."""

    samples: int
    """Observations since the model last started anew."""
    cold: bool
    """Too few of them: predictions are 0 and the explicit terms stand alone."""
    drifts: int
    """Times that the model started anew because its error rose."""
    mae_s: float
    """Mean absolute error, seconds."""
    bias_s: float
    """Mean of observed minus predicted, seconds."""
    explicit_mae_s: float
    """Mean absolute error of the explicit terms alone, for comparison."""


class ResidualEstimator:
    """Learns from finished requests of one ingress; the features' names are the caller's, the same in every call."""

    def __init__(self, bound_s: float, min_samples: int) -> None:
        """Args: bound_s: largest correction either way. min_samples: observations before it is used.

        Raises:
            ValueError: bound_s is not finite and above 0, or min_samples not at least 1.
        """
        if not 0 < bound_s < math.inf:
            raise ValueError(f"bound_s must be finite and above 0, got {bound_s}")
        if min_samples < 1:
            raise ValueError(f"min_samples must be at least 1, got {min_samples}")
        self._bound_s = bound_s
        self._min_samples = min_samples
        self._drifts = 0
        self._error_s, self._bias_s, self._explicit_error_s = _FadingMean(), _FadingMean(), _FadingMean()
        self._start_anew()

    def predict_s(self, features: Mapping[str, float]) -> float:
        """The correction in seconds, within +-bound_s; 0.0 while cold, which is also so right after a drift.

        Raises:
            ValueError: a feature is not finite.
        """
        _refuse_not_finite(features)
        return self._correction_s(features) if self._is_warm() else 0.0

    def observe(self, features: Mapping[str, float], explicit_s: float, observed_s: float) -> None:
        """Score the prediction for `features`, then learn from what was observed.

        Args:
            features: as they were when the request was placed.
            explicit_s: what the explicit terms predicted then, seconds.
            observed_s: the TTFT that came of it, seconds.

        Raises:
            ValueError: a number is not finite; nothing is learned.
        """
        _refuse_not_finite({**features, "explicit_s": explicit_s, "observed_s": observed_s})
        residual_s = observed_s - explicit_s
        error_s = residual_s - self.predict_s(features)
        self._error_s.add(abs(error_s))
        self._bias_s.add(error_s)
        self._explicit_error_s.add(abs(residual_s))
        if self._is_warm() and self._error_rose(abs(error_s)):
            self._drifts += 1
            self._start_anew()
        self._learn(features, residual_s)

    @property
    def state(self) -> ResidualState:
        """Snapshot for metrics and explanations."""
        return ResidualState(
            samples=self._samples,
            cold=not self._is_warm(),
            drifts=self._drifts,
            mae_s=self._error_s.value,
            bias_s=self._bias_s.value,
            explicit_mae_s=self._explicit_error_s.value,
        )

    def _is_warm(self) -> bool:
        return self._samples >= self._min_samples

    def _start_anew(self) -> None:
        self._samples = 0
        self._scaler: Any = preprocessing.StandardScaler()
        self._model: Any = linear_model.LinearRegression(
            optimizer=optim.SGD(WEIGHT_RATE), intercept_lr=INTERCEPT_RATE, clip_gradient=2.0 * self._bound_s
        )
        self._adwin: Any = drift.ADWIN()

    def _scaled(self, features: Mapping[str, float]) -> dict[str, float]:
        scaled = self._scaler.transform_one(features)
        return {name: _within(value, SCALED_LIMIT) for name, value in scaled.items()}

    def _correction_s(self, features: Mapping[str, float]) -> float:
        return _within(float(self._model.predict_one(self._scaled(features))), self._bound_s)

    def _error_rose(self, error_s: float) -> bool:
        """Feed the detector; True when the error's mean has changed and is larger than before."""
        before = self._adwin.estimation
        self._adwin.update(min(error_s / self._bound_s, 2.0))
        return bool(self._adwin.drift_detected) and self._adwin.estimation > before

    def _learn(self, features: Mapping[str, float], residual_s: float) -> None:
        self._scaler.learn_one(features)
        self._model.learn_one(self._scaled(features), _within(residual_s, 2.0 * self._bound_s))
        self._samples += 1


class _FadingMean:
    """Mean of what was added, exponentially weighted over `ERROR_WINDOW`, right from the first value on."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num = 0

    def add(self, value: float) -> None:
        self._num += 1
        self.value += (value - self.value) / min(self._num, ERROR_WINDOW)


def _within(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))


def _refuse_not_finite(numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
