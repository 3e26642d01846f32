"""Which policies a run uses: the three decisions by name, and what is set otherwise than by default."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.config import EnginePolicy, PrefillTable, RouterSettings, RoutingDocument, RoutingWeights
from serve_app.router.baselines import PUBLISHED_WEIGHTS

Number = float | int | bool


@dataclass(frozen=True, slots=True)
class Policies:
    """The three decisions by name, as the settings spell them; the defaults are the product's."""

    router: str = "lbgr"
    ordering: str = "fairway-carried"
    eviction: str = "adaptive"
    engine: Mapping[str, Number] = field(default_factory=dict)
    """Other fields of `EnginePolicy`."""
    weights: Mapping[str, Number] = field(default_factory=dict)
    """Fields of `RoutingWeights`, on top of those that the router was published with."""
    settings: Mapping[str, Number] = field(default_factory=dict)
    """Other fields of `RouterSettings`."""

    def labels(self) -> dict[str, str]:
        """`ordering`, `eviction` and `router` of a row, with what was changed."""
        protects = {name: value for name, value in self.engine.items() if name == "protect_waiting"}
        ordering = {name: value for name, value in self.engine.items() if name not in protects}
        return {
            "ordering": _label(self.ordering, ordering),
            "eviction": _label(self.eviction, protects),
            "router": _label(self.router, {**self.weights, **self.settings}),
        }

    def engine_policy(self, seed: int, table: PrefillTable) -> EnginePolicy:
        """Raises ValueError on an unknown name or a value out of bounds."""
        named = {"ordering": self.ordering, "eviction": self.eviction, "seed": seed}
        return EnginePolicy.model_validate({**named, **self.engine, "prefill_profile": table})

    def router_settings(self, seed: int) -> RouterSettings:
        """Raises ValueError on an unknown name or a value out of bounds."""
        published = PUBLISHED_WEIGHTS.get(self.router, RoutingWeights()).model_dump()
        routing = RoutingDocument.model_validate({"router": self.router, "weights": {**published, **self.weights}})
        return RouterSettings.model_validate({**self.settings, "routing": routing, "seed": seed})


BASELINE = Policies(router="round-robin", ordering="fcfs", eviction="lru")
"""What a cluster does without us."""


def _label(name: str, changed: Mapping[str, Number]) -> str:
    texts = [field if value is True else f"{field}={value:g}" for field, value in changed.items()]
    return f"{name} ({', '.join(texts)})" if texts else name
