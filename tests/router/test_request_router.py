"""The Serve router follows a request's wish where it can, on the state that it would ask anyway."""

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.config import RouterSettings
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.live_routing import LiveRouting
from serve_app.router.request_router import LbgrRouter
from serve_app.router.routing_state import RouteRequest
from serve_app.router.wishes import NO_WISH, Wish

REPLICAS = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=f"r{number}")) for number in range(3)]


@pytest.fixture
def router() -> Any:
    # Without Serve's constructor, which wants a running Serve; what it would find out is set here.
    made: Any = LbgrRouter.__new__(LbgrRouter)
    made._alone, made._live = False, LiveRouting(RouterSettings(), PrefillProfile.flat())
    return made


async def _picked(router: Any, request_id: str, wish: Wish) -> str:
    pending = SimpleNamespace(args=(RouteRequest(request_id, 100), wish), kwargs={})
    ((replica,),) = await router.choose_replicas(REPLICAS, pending)
    return str(replica.replica_id.unique_id)


async def test_pin_is_followed_however_loaded_the_replica_is(router: Any) -> None:
    for number in range(5):
        assert await _picked(router, f"q{number}", Wish(pin="r1")) == "r1"
    assert router._live.state.ledger.num_open("r1") == 5
    (terms,) = router._live.state.decisions.get("q4").decision.candidates
    assert terms.replica_id == "r1"


async def test_pin_on_a_replica_that_is_not_there_routes_as_without(router: Any) -> None:
    assert await _picked(router, "q0", Wish(pin="gone")) in {"r0", "r1", "r2"}
    assert len(router._live.state.decisions.get("q0").decision.candidates) == 3


async def test_named_rule_decides_its_request_alone(router: Any) -> None:
    await _picked(router, "q0", Wish(router="round-robin"))
    await _picked(router, "q1", NO_WISH)
    rules = [router._live.state.decisions.get(request_id).decision.router for request_id in ("q0", "q1")]
    assert rules == ["round-robin", "lbgr"]


async def test_request_without_a_wish_is_routed_by_the_live_document(router: Any) -> None:
    picked = {await _picked(router, f"q{number}", NO_WISH) for number in range(3)}
    assert picked == {"r0", "r1", "r2"}


async def test_request_that_the_ingress_did_not_read_is_routed_by_load(router: Any) -> None:
    ((replica,),) = await router.choose_replicas(REPLICAS, SimpleNamespace(args=(), kwargs={}))
    assert replica in REPLICAS
    assert await router.choose_replicas([], None) == []
