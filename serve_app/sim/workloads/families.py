"""The families by name, with their defaults."""

from collections.abc import Mapping
from types import MappingProxyType

from serve_app.sim.workloads.documents import FilingParams
from serve_app.sim.workloads.mixed import MixedParams
from serve_app.sim.workloads.passages import MULTIHOP, RetrievalParams
from serve_app.sim.workloads.prefixes import HitHeavyParams, RecencyParams, WeakSpotParams
from serve_app.sim.workloads.timing import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "filing": FilingParams(),
        "retrieval": RetrievalParams(),
        "hit-heavy": HitHeavyParams(),
        "mixed": MixedParams(),
        "multihop": MULTIHOP,
        "weak-spot": WeakSpotParams(),
        "recency": RecencyParams(),
    }
)
"""Name -> what is asked; when is said by `timing`."""
