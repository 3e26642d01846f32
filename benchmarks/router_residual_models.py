"""What the router saw of each request when it placed it, and models that predict the TTFT from it.

A model is scored as it would have served: it predicts when the request is placed, and learns from it when its first
token is heard of, in the order in which the router heard. Pure; deterministic.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from river import linear_model, optim, preprocessing, tree

from serve_app.config import RouterSettings
from serve_app.router.estimator import Features, ResidualEstimator

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that got a first token. Times are seconds of the run's clock."""

    placed_s: float
    heard_s: float
    """When the router heard of its first token."""
    replica_id: str
    features: Features
    """What the estimator saw when the request was placed."""
    hit_tokens: int
    miss_tokens: int
    explicit_s: float
    """What the explicit terms predicted then."""
    predicted_s: float
    """What the router predicted then."""
    ttft_s: float


class Model(Protocol):
    """Something that corrects the explicit terms."""

    def correction_s(self, sample: Sample) -> float:
        """Seconds to add to the explicit terms; must not read `ttft_s`."""

    def learn(self, sample: Sample) -> None:
        """Learn from the request, whose first token has come."""


def predictions_s(model: Model, samples: Sequence[Sample]) -> FloatArray:
    """What a fresh model predicts for each request at the time it is placed.

    Args:
        samples: in the order in which the router heard of their first tokens.

    Returns:
        (n,), seconds, at least 0, in the order of `samples`.
    """
    unheard, predicted = deque(samples), np.zeros(len(samples))
    for index in sorted(range(len(samples)), key=lambda one: samples[one].placed_s):
        sample = samples[index]
        while unheard[0].heard_s <= sample.placed_s:
            model.learn(unheard.popleft())
        predicted[index] = max(0.0, sample.explicit_s + model.correction_s(sample))
    return predicted


class ExplicitTerms:
    """No model at all."""

    def correction_s(self, sample: Sample) -> float:
        """Always 0."""
        return 0.0

    def learn(self, sample: Sample) -> None:
        """Nothing."""


class Estimators:
    """The product's estimator: one for all replicas, or one for each."""

    def __init__(self, settings: RouterSettings, without: Collection[str] = (), *, per_replica: bool = False) -> None:
        """Args: without: features to leave out."""
        self._settings = settings
        self._without = without
        self._per_replica = per_replica
        self._estimators: dict[str, ResidualEstimator] = {}

    def correction_s(self, sample: Sample) -> float:
        """Whole, not as bounded for a choice."""
        return self._of(sample).predict_s(sample.replica_id, self._features(sample))

    def learn(self, sample: Sample) -> None:
        """As the router does."""
        self._of(sample).observe(sample.replica_id, self._features(sample), sample.explicit_s, sample.ttft_s)

    def _of(self, sample: Sample) -> ResidualEstimator:
        key = sample.replica_id if self._per_replica else ""
        if key not in self._estimators:
            bound_s, min_samples = self._settings.residual_bound_s, self._settings.residual_min_samples
            self._estimators[key] = ResidualEstimator(bound_s, min_samples)
        return self._estimators[key]

    def _features(self, sample: Sample) -> Features:
        return {name: value for name, value in sample.features.items() if name not in self._without}


class Pipeline:
    """A pipeline of River's, one for all replicas, that learns the residual; cold as long as the product's is."""

    def __init__(
        self,
        pipeline: Any,
        min_samples: int,
        features_of: Callable[[Sample], Features] = lambda sample: sample.features,
        limit_s: float = math.inf,
    ) -> None:
        """Args: limit_s: largest correction, either way."""
        self._pipeline = pipeline
        self._min_samples = min_samples
        self._features_of = features_of
        self._limit_s = limit_s
        self._num_learned = 0

    def correction_s(self, sample: Sample) -> float:
        """0 while cold."""
        if self._num_learned < self._min_samples:
            return 0.0
        residual_s = float(self._pipeline.predict_one(self._features_of(sample)) or 0.0)
        return max(-self._limit_s, min(self._limit_s, residual_s))

    def learn(self, sample: Sample) -> None:
        """Observed minus explicit seconds."""
        self._pipeline.learn_one(self._features_of(sample), sample.ttft_s - sample.explicit_s)
        self._num_learned += 1


def former_features(sample: Sample) -> Features:
    """The four that the router learned from before."""
    return {
        "miss_tokens": float(sample.miss_tokens),
        "hit_tokens": float(sample.hit_tokens),
        "load_s": sample.features["queue_s"],
        "num_open": sample.features["num_queued"] + sample.features["num_decoding"],
    }


def _former(settings: RouterSettings, limit_s: float) -> Model:
    regression = linear_model.LinearRegression(
        optimizer=optim.SGD(0.02), intercept_lr=0.1, clip_gradient=2.0 * settings.residual_bound_s
    )
    pipeline = preprocessing.StandardScaler() | regression
    return Pipeline(pipeline, settings.residual_min_samples, former_features, limit_s)


def _adaptive_tree(settings: RouterSettings) -> Model:
    grown = tree.HoeffdingAdaptiveTreeRegressor(grace_period=50, leaf_prediction="adaptive", seed=0)
    return Pipeline(preprocessing.StandardScaler() | grown, settings.residual_min_samples)


EXPLICIT, CHOSEN = "explicit alone", "chosen"
MODELS: Mapping[str, Callable[[RouterSettings], Model]] = {
    EXPLICIT: lambda settings: ExplicitTerms(),
    "former": lambda settings: _former(settings, settings.residual_bound_s),
    "former, unbounded": lambda settings: _former(settings, math.inf),
    CHOSEN: lambda settings: Estimators(settings),
    "one a replica": lambda settings: Estimators(settings, per_replica=True),
    "without ahead_s": lambda settings: Estimators(settings, ("ahead_s",)),
    "adaptive tree": _adaptive_tree,
}
"""Every model by the name of its column; each call makes a fresh one."""
