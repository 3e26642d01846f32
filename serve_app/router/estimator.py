"""What the explicit terms get wrong, learned online: observed TTFT minus (miss + hit + queue seconds).

River's Bayesian linear regression with forgetting, behind a standard scaler; all replicas share it, so that a new one
is predicted well from its first request. What one replica then still differs by (it is slower, say) is a term of its
own, the fading mean of what the shared model leaves. Every quantity that enters is bounded (the scaled features, the
target), so one absurd observation is forgotten like any other. ADWIN watches the error; when it rises the model starts
anew.

The whole correction belongs to the predicted TTFT. A choice takes of it only by how much a replica's own term is worse
than the mean, within +-`bound_s` (`choice_s`): the shared part is a function of what the explicit terms already weigh,
and where it learns that a queue is waited for less than its length it takes away what keeps replicas level; a free
residual was measured to destroy placement at saturation. Cost: a few microseconds to predict, tens to learn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from river import drift, linear_model, preprocessing

from serve_app.router.prediction_errors import ErrorTracker, FadingMean, PredictionErrors

Features = Mapping[str, float]
"""Seconds and counts by name, the same names in every call, each finite."""

FORGETTING = 0.98
"""Weight of everything learned before, at each observation: the last 50 count for two thirds. From 0.98 to 0.995 the
error out of sample was measured to be the same."""
SCALED_LIMIT = 3.0
"""Scaled features are cut at so many standard deviations."""
CONSTANT = "constant"
"""Name of the feature that is always 1."""
TARGET_LIMIT_S = 60.0
"""A residual is learned as at most so much, either way."""
REPLICA_RATE = 0.05
"""Share by which a replica's own term follows each of its observations."""
NOISE = 3.0 * 1.25 * math.sqrt(REPLICA_RATE / 2.0)
"""Three standard errors of such a term, as a multiple of the mean absolute error of normal noise: less was measured to
keep replicas from being level (12 % behind least work where there is nothing to learn)."""


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
    interval_s: float
    """Half-width of the interval that should hold nine of ten observations."""
    coverage: float
    """Share of the last observations that it held."""
    explicit_mae_s: float
    """Mean absolute error of the explicit terms alone, for comparison."""


class ResidualEstimator:
    """Learns from finished requests of one ingress."""

    def __init__(self, bound_s: float, min_samples: int) -> None:
        """Args: bound_s: largest correction of a choice, either way. min_samples: observations before it is used.

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
        self._explicit_error_s = FadingMean()
        self._errors = ErrorTracker()
        self._replicas: dict[str, _Replica] = {}
        self._start_anew()

    def predict_s(self, replica_id: str, features: Features) -> float:
        """The correction in seconds; 0.0 while cold, which is also so right after a drift.

        Raises:
            ValueError: a feature is not finite.
        """
        _refuse_not_finite(features)
        return self._shared_s(features) + self._own_s(replica_id) if self._is_warm() else 0.0

    def choice_s(self, replica_id: str) -> float:
        """What of the correction counts in a choice: by how much the replica is worse than the mean, beyond noise.

        Seconds within +-`bound_s`, negative for a better one; 0.0 while cold and for a replica never observed.
        """
        own = self._replicas.get(replica_id)
        if own is None or not self._is_warm():
            return 0.0
        worse_s = own.offset_s - self._offsets_s / len(self._replicas)
        beyond_s = max(0.0, abs(worse_s) - NOISE * own.error_s.value)
        return _within(math.copysign(beyond_s, worse_s), self._bound_s)

    def observe(self, replica_id: str, features: Features, explicit_s: float, observed_s: float) -> None:
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
        predicted_s = max(0.0, explicit_s + self.predict_s(replica_id, features))
        error_s = observed_s - predicted_s
        own = self._replicas.setdefault(replica_id, _Replica())
        own.errors.add(error_s)
        self._errors.add(error_s)
        self._explicit_error_s.add(abs(residual_s))
        if self._is_warm() and self._error_rose(abs(error_s), observed_s):
            self._drifts += 1
            self._start_anew()
        self._learn(own, features, _within(residual_s, TARGET_LIMIT_S))

    def forget(self, replica_id: str) -> None:
        """The replica is gone or has restarted: its own term and its errors go, the shared model stays."""
        self._offsets_s -= self._own_s(replica_id)
        self._replicas.pop(replica_id, None)

    def replica_ids(self) -> set[str]:
        """Replicas that have been observed."""
        return set(self._replicas)

    def errors(self, replica_id: str) -> PredictionErrors:
        """Of the predictions for one replica."""
        own = self._replicas.get(replica_id)
        return own.errors.errors if own else PredictionErrors()

    @property
    def state(self) -> ResidualState:
        """Snapshot for metrics and explanations."""
        errors = self._errors.errors
        return ResidualState(
            samples=self._samples,
            cold=not self._is_warm(),
            drifts=self._drifts,
            mae_s=errors.mae_s,
            bias_s=errors.bias_s,
            interval_s=errors.interval_s,
            coverage=errors.coverage,
            explicit_mae_s=self._explicit_error_s.value,
        )

    def is_cold(self) -> bool:
        """Whether there are too few observations to correct anything."""
        return not self._is_warm()

    def _own_s(self, replica_id: str) -> float:
        own = self._replicas.get(replica_id)
        return own.offset_s if own else 0.0

    def _is_warm(self) -> bool:
        return self._samples >= self._min_samples

    def _start_anew(self) -> None:
        self._samples = 0
        self._scaler: Any = preprocessing.StandardScaler()
        self._model: Any = linear_model.BayesianLinearRegression(smoothing=FORGETTING)
        self._adwin: Any = drift.ADWIN()
        self._offsets_s = 0.0
        for own in self._replicas.values():
            own.offset_s = 0.0

    def _scaled(self, features: Features) -> dict[str, float]:
        scaled = self._scaler.transform_one(features)
        return {CONSTANT: 1.0, **{name: _within(value, SCALED_LIMIT) for name, value in scaled.items()}}

    def _shared_s(self, features: Features) -> float:
        return _within(float(self._model.predict_one(self._scaled(features))), TARGET_LIMIT_S)

    def _error_rose(self, error_s: float, observed_s: float) -> bool:
        """Feed the detector; True when the error's mean has changed and is larger than before.

        The error counts in quarters of the bound and what was observed, so that a long queue alone is no drift.
        """
        before = self._adwin.estimation
        self._adwin.update(min(4.0 * error_s / (self._bound_s + observed_s), 2.0))
        return bool(self._adwin.drift_detected) and self._adwin.estimation > before

    def _learn(self, own: "_Replica", features: Features, residual_s: float) -> None:
        self._scaler.learn_one(features)
        scaled = self._scaled(features)
        left_s = residual_s - _within(float(self._model.predict_one(scaled)), TARGET_LIMIT_S)
        own.error_s.add(abs(left_s - own.offset_s))
        step_s = REPLICA_RATE * (left_s - own.offset_s)
        own.offset_s += step_s
        self._offsets_s += step_s
        self._model.learn_one(scaled, residual_s)
        self._samples += 1


@dataclass(slots=True)
class _Replica:
    offset_s: float = 0.0
    error_s: FadingMean = field(default_factory=FadingMean)
    """Mean distance of what the term follows from the term."""
    errors: ErrorTracker = field(default_factory=ErrorTracker)


def _within(value: float, limit: float) -> float:
    return max(-limit, min(limit, value))


def _refuse_not_finite(numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
