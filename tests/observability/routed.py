"""A real `RoutingState` with some history, and the snapshot that an ingress makes of it."""

from dataclasses import asdict
from typing import Any

from serve_app.config import RouterSettings
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.kv_events import KvEventCounters
from serve_app.router.lifecycle import Closed, FirstToken, LifecycleBatch, Opened
from serve_app.router.routing_state import RouteRequest, RoutingState
from serve_app.router.wishes import BAD_PIN


def routed_state(num_requests: int = 6, replica_ids: tuple[str, ...] = ("a", "b")) -> RoutingState:
    """Requests routed, all but the last of them answered."""
    state = RoutingState(RouterSettings(), PrefillProfile.flat(), block_size_tokens=16)
    for number in range(num_requests):
        request_id, now_s = f"request-{number}", 100.0 + number
        decision = state.decide(RouteRequest(request_id, 400, (b"one", b"two")), replica_ids, now_s)
        events: tuple[Opened | FirstToken | Closed, ...] = (Opened(request_id, decision.service_s),)
        if number < num_requests - 1:
            events += (FirstToken(request_id, 0.2, 32, 400), Closed(request_id, 200, "finished", 0.4, 0.2, 400, 32, 8))
        state.on_batch(LifecycleBatch(decision.replica_id, "first", number, events), now_s)
        state.index.stored(decision.replica_id, (b"one", b"two"))
    return state


def ingress_snapshot(state: RoutingState, now_s: float = 110.0, **added: Any) -> dict[str, Any]:
    """What `FairwayIngress.state` answers."""
    kv_events = KvEventCounters(
        batches=7, events=9, gaps=1, replayed=2, resets=1, decode_errors=1, restarts=1, dead_batches=3
    )
    return {
        "ingress": "i",
        **state.snapshot(now_s),
        "untokenised": {"no JSON object": 2, "body too long": 1},
        "wishes": {"": 4, BAD_PIN: 1},
        "kv_events": asdict(kv_events),
        "feeds": {"a": {"silent_s": 0.5, "lag_s": 0.01}, "b": {"silent_s": 3.0, "lag_s": None}},
        **added,
    }
