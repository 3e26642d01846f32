"""The thin Serve router: asks `RoutingState` for each request and keeps it in step with the running replicas.

In our own application the ingress makes the state and hands it over with `share_routing_state`. Where the class is used
alone, by configuration, in an existing Ray Serve LLM application or in Serve's fallback proxy, it makes a state of its
own; nobody reports completions to it there, so its reservations decay and expire.
"""

import asyncio
import random
import time
import uuid
from typing import Any, TypeVar

from serve_app.config import RouterSettings
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router import ray_internals
from serve_app.router.live_routing import LiveRouting, shared_routing_state
from serve_app.router.routing_state import RouteRequest
from serve_app.router.wishes import NO_WISH, Wish

T = TypeVar("T")

ALONE_HALF_LIFE_S = 0.5
"""Decay of assigned work when no life-cycle events arrive; the published router's is 0.44 s."""
ALONE_EXPIRY_S = 10.0
"""When such a reservation, long decayed, is taken off the books."""


class LbgrRouter(ray_internals.KVAwareRouter):  # type: ignore[misc]  # Ray's private classes are untyped
    """LBGR as Serve's request router; deriving from `KVAwareRouter` makes Ray advertise KV events and token ids."""

    def initialize_state(self, settings: dict[str, Any] | None = None, **_: Any) -> None:
        """Find the ingress' state, or make one from `request_router_kwargs: {settings: {...}}`."""
        shared = shared_routing_state(str(self._deployment_id))
        self._alone = shared is None
        self._live = shared or LiveRouting(_settings_alone(settings), PrefillProfile.flat(), own_topics=False)

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve's view of the running replicas changed, or one advertised new routing stats."""
        super().update_replicas(replicas)
        self._live.follow(replicas)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Rank by the live document; the first is reserved before this returns."""
        if not candidate_replicas:
            return []
        request = self._route_request(pending_request)
        wish = _argument(pending_request, Wish) or NO_WISH
        by_id = {ray_internals.replica_unique_id(replica): replica for replica in candidate_replicas}
        candidates = [wish.pin] if wish.pin in by_id else list(by_id)
        decision = self._live.state.decide(request, candidates, time.time(), router=wish.router)
        if self._alone:
            asyncio.get_running_loop().call_later(ALONE_EXPIRY_S, self._expire, request.request_id)
        return [[by_id[decision.replica_id]]]

    def _route_request(self, pending_request: Any) -> RouteRequest:
        request = _argument(pending_request, RouteRequest)
        if request is not None:
            return request
        token_ids = (pending_request.kwargs if pending_request else {}).get(ray_internals.REQUEST_TOKEN_IDS_KWARG)
        hashes = self._live.hashes(token_ids) if token_ids else ()
        return RouteRequest(uuid.uuid4().hex, len(token_ids or ()), hashes)

    def _expire(self, request_id: str) -> None:
        self._live.state.expire(request_id, time.time())


def _argument(pending_request: Any, kind: type[T]) -> T | None:
    """The positional argument of that class, as the ingress gives them to `ray_internals.pick_replica`."""
    args = pending_request.args if pending_request is not None else ()
    return next((arg for arg in args if isinstance(arg, kind)), None)


def _settings_alone(settings: dict[str, Any] | None) -> RouterSettings:
    given = RouterSettings.model_validate(settings or {"seed": random.SystemRandom().randrange(2**31)})
    weights = given.routing.weights.model_copy(update={"load_half_life_s": ALONE_HALF_LIFE_S})
    return given.model_copy(update={"routing": given.routing.model_copy(update={"weights": weights})})
