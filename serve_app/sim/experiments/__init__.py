"""The experiments by name: A, the order of the waiting queue; B, eviction; C, routing, and all three together."""

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.sim.experiments import eviction, ordering, routing
from serve_app.sim.experiments.base import Experiment, Options

__all__ = ["EXPERIMENTS", "Experiment", "Options"]

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {one.name: one for one in (*ordering.EXPERIMENTS, *eviction.EXPERIMENTS, *routing.EXPERIMENTS)}
)
"""By the names that `fairway-serve simulate` takes."""
