"""Policies by name: what a row calls them, and what the settings make of them."""

from serve_app.config import RoutingWeights
from serve_app.router.baselines import PUBLISHED_WEIGHTS
from serve_app.sim.chosen import BASELINE, Policies


def test_a_row_calls_policies_by_their_names_alone() -> None:
    plain = {"ordering": "fairway-carried", "eviction": "adaptive", "router": "lbgr"}
    assert Policies().labels() == plain
    assert BASELINE.labels() == {"ordering": "fcfs", "eviction": "lru", "router": "round-robin"}


def test_what_was_changed_stands_beside_the_name_that_it_changes() -> None:
    policies = Policies(
        engine={"fast_weight": 8, "protect_waiting": True},
        weights={"affinity": 16.0},
        settings={"residual_bound_s": 0.5},
    )
    assert policies.labels() == {
        "ordering": "fairway-carried (fast_weight=8)",
        "eviction": "adaptive (protect_waiting)",
        "router": "lbgr (affinity=16, residual_bound_s=0.5)",
    }


def test_router_starts_with_the_weights_that_it_was_published_with() -> None:
    settings = Policies(router="lbgr-published", weights={"miss": 3.0}).router_settings(seed=7)
    published = PUBLISHED_WEIGHTS["lbgr-published"]
    assert settings.routing.weights == published.model_copy(update={"miss": 3.0})
    assert settings.seed == 7
    assert Policies().router_settings(0).routing.weights == RoutingWeights()
