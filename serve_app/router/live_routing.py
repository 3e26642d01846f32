"""One process' routing state with what feeds it, and the hand-over from the ingress to the Serve router.

Serve sends the router's class to other processes by value, with copies of its module's globals; what the two must share
therefore stands in this module, which is imported by name.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from serve_app.config import RouterSettings
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router import ray_internals
from serve_app.router.block_hashes import BlockHasher
from serve_app.router.kv_events import KvEventSubscriber
from serve_app.router.routing_state import RoutingState

logger = logging.getLogger("ray.serve")

_SHARED: dict[str, "LiveRouting"] = {}


class LiveRouting:
    """One process' routing state with what feeds it: the block hasher and the KV-event subscriber."""

    def __init__(self, settings: RouterSettings, profile: PrefillProfile, *, own_topics: bool = True) -> None:
        """Args: own_topics: replicas publish under their unique ids (`ray_internals.use_free_ports`), not under ""."""
        self._own_topics = own_topics
        self.state = RoutingState(settings, profile, None)
        self.subscriber = KvEventSubscriber(self.state.index)
        self.state.trust_events_of(self.subscriber.is_trusted)
        self.hasher: BlockHasher | None = None
        self._followed: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def hashes(self, token_ids: list[int], cache_salt: str | None = None) -> tuple[bytes, ...]:
        """The prompt's full KV blocks; empty until a replica has told its block size."""
        return self.hasher.hashes(token_ids, cache_salt) if self.hasher else ()

    def follow(self, replicas: list[Any]) -> None:
        """Follow the KV events of each replica that advertises them; forget the departed at once."""
        present = {ray_internals.replica_unique_id(r): ray_internals.kv_event_endpoints(r) for r in replicas}
        for departed in self._followed - present.keys():
            self._followed.discard(departed)
            self._run(self.subscriber.unfollow(departed))
        self.state.set_replicas(present)
        for replica_id, endpoints in present.items():
            if endpoints is not None and replica_id not in self._followed:
                self._followed.add(replica_id)
                self._learn_block_size(endpoints["block_size"])
                topic = replica_id if self._own_topics else ""
                replay_endpoint = endpoints.get("replay_endpoint")
                self._run(self.subscriber.follow(replica_id, topic, endpoints["endpoint"], replay_endpoint))

    def _learn_block_size(self, block_size_tokens: int) -> None:
        if self.hasher is None:
            self.hasher = BlockHasher(block_size_tokens)
            self.state.block_size_tokens = block_size_tokens

    def _run(self, coro: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("Following KV events failed: %s", task.exception())


def share_routing_state(deployment: str, live: LiveRouting) -> None:
    """Let the router of `deployment` in this process use `live`; called before its handle is initialised."""
    _SHARED[deployment] = live


def shared_routing_state(deployment: str) -> LiveRouting | None:
    """What was shared for `deployment` in this process, if anything."""
    return _SHARED.get(deployment)
