"""The routing step: HAProxy posts each request's body here and streams to the replica that the answer names.

Nothing here raises: a body that can't be parsed, tokenised or is cut short is routed by load alone, so that a client's
error is answered by vLLM in its own words and never turned into a 503 by the routing step. A wish that can't be
followed is likewise ignored, and a note in the answer says so.
"""

import asyncio
import gc
import logging
import math
import os
import time
import uuid
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from ray import serve

from serve_app.config import FairwayServeConfig, RoutingDocument
from serve_app.deployments import middleware
from serve_app.deployments.prompt_tokens import PromptTokeniser, PromptTokens, ReadBody
from serve_app.deployments.start_error import start_error
from serve_app.environment import check_environment
from serve_app.observability.metrics import RoutingMetrics
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router import ray_internals
from serve_app.router.block_hashes import seed_fingerprint
from serve_app.router.kv_event_feed import FeedState
from serve_app.router.lifecycle import LifecycleBatch
from serve_app.router.live_routing import LiveRouting, share_routing_state
from serve_app.router.routing_state import RouteRequest
from serve_app.router.wishes import WishLog, parse_wish

logger = logging.getLogger("ray.serve")

BODY_TRUNCATED_HEADER = "x-body-truncated"
PUBLISH_EVERY_S = 5.0

ingress_app = FastAPI(openapi_url=None)


# It stands above the class because `serve.ingress` pickles the routes while the class is being made.
def feed_figures(feed: FeedState) -> dict[str, float | None]:
    """Seconds of one replica's KV-event feed, ready for JSON; None before the first sign of life or batch."""
    figures = {"silent_s": feed.silent_s, "lag_s": feed.lag_s}
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


@serve.ingress(ingress_app)
class FairwayIngress:
    """Deployed under the name `LLMRouter`, by which engines look their ingress up."""

    async def __init__(self, server: Any, llm_config: Any, config: FairwayServeConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        try:
            await self._start(server, llm_config, config)
        except Exception as error:
            raise start_error(error) from None

    async def _start(self, server: Any, llm_config: Any, config: FairwayServeConfig) -> None:
        check_environment(os.environ)
        self._allow_wishes = config.ingress.allow_wishes
        self._untokenised: dict[str, int] = {}
        self._wishes = WishLog(config.router.decisions_kept)
        table = config.engine.policy.prefill_profile
        profile = PrefillProfile(table) if table else PrefillProfile.flat()
        self._live = LiveRouting(config.router, profile)
        # The router of this process' handle looks the state up when the handle is initialised.
        share_routing_state(str(server.deployment_id), self._live)
        self._tokeniser = await asyncio.to_thread(PromptTokeniser, llm_config, config.model.id, config.ingress)
        self._token_sender = ray_internals.TokenSender()
        self._handle = server
        self._handle._init()
        self._publishing = asyncio.get_running_loop().create_task(self._publish_forever())
        # What vLLM's modules left behind never dies; scanning it again and again stalls routing for half a second.
        gc.collect()
        gc.freeze()

    @ingress_app.post("/internal/route")
    async def route(self, request: Request) -> Any:
        """HAProxy's question; see Ray's ingress_request_router.lua for the contract."""
        truncated = BODY_TRUNCATED_HEADER in request.headers
        block_size = self._live.state.block_size_tokens
        read = await self._tokeniser.read(await request.body(), block_size, truncated=truncated)
        wish = parse_wish(read.body, allowed=self._allow_wishes)
        route_request = self._route_request(read)
        replica = await ray_internals.pick_replica(self._handle, route_request, wish)
        address = ray_internals.http_address(replica)
        if address is None:
            self._live.state.expire(route_request.request_id, time.time())
            return JSONResponse({"detail": "the chosen replica has no HTTP address yet"}, status_code=503)
        wish = wish.after(ray_internals.replica_unique_id(replica))
        if wish.was_made:
            self._wishes.keep(route_request.request_id, wish)
        headers = self._trusted_headers(route_request.request_id, wish.note)
        token_key = self._send_token_ids(replica, read.tokens)
        if token_key is not None:
            headers[ray_internals.KV_TOKEN_KEY_HEADER] = token_key
        return {
            "host": address[0],
            "port": address[1],
            "replica_id": ray_internals.full_replica_id(replica),
            ray_internals.RAY_SERVE_INGRESS_REQUEST_ROUTER_OPT_HEADERS_FIELD: headers,
        }

    async def on_fairway_events(self, batch: LifecycleBatch) -> None:
        """A replica's life-cycle events."""
        self._live.state.on_batch(batch, time.time())

    async def apply_routing(self, document: RoutingDocument) -> int:
        """Take over a newer routing document; returns the version in force."""
        self._live.state.apply(document)
        return self._live.state.document.version

    async def state(self) -> dict[str, Any]:
        """Everything this ingress knows, JSON-ready."""
        snapshot = self._live.state.snapshot(time.time())
        return {
            "ingress": serve.get_replica_context().replica_id.unique_id,
            **snapshot,
            "untokenised": dict(self._untokenised),
            "wishes": dict(self._wishes.counts),
            "kv_events": asdict(self._live.subscriber.counters),
            "feeds": {
                replica["replica_id"]: feed_figures(feed)
                for replica in snapshot["replicas"]
                if (feed := self._live.subscriber.feed(replica["replica_id"])) is not None
            },
            "hash_seed": seed_fingerprint(),
        }

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """The whole decision on one request, JSON-ready; None when this ingress does not remember it."""
        record = self._live.state.decisions.get(request_id)
        if record is None:
            return None
        wish = self._wishes.get(request_id)
        return {
            "ingress": serve.get_replica_context().replica_id.unique_id,
            **record.as_row(),
            "wish": asdict(wish) if wish else None,
        }

    async def _publish_forever(self) -> None:
        metrics = RoutingMetrics()
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            try:
                metrics.publish(await self.state())
            except Exception:  # a metric must never take routing down
                logger.exception("Publishing metrics failed; trying again in %s s", PUBLISH_EVERY_S)

    def _route_request(self, read: ReadBody) -> RouteRequest:
        if read.untokenised is not None:
            self._untokenised[read.untokenised] = self._untokenised.get(read.untokenised, 0) + 1
        request_id, tokens = uuid.uuid4().hex, read.tokens
        if tokens is None:
            return RouteRequest(request_id, 0, output_tokens=read.output_tokens)
        return RouteRequest(request_id, tokens.num_tokens, tokens.hashes, tokens.num_prompts, read.output_tokens)

    def _trusted_headers(self, request_id: str, note: str) -> dict[str, str]:
        record = self._live.state.decisions.get(request_id)
        if record is None:
            return {}
        decision = record.decision
        return {
            middleware.ID_HEADER: request_id,
            middleware.PREDICTED_HEADER: f"{decision.predicted_s * 1e3:.1f}",
            middleware.HIT_HEADER: str(decision.hit_tokens),
            middleware.SERVICE_HEADER: f"{decision.service_s * 1e3:.3f}",
            **({middleware.NOTE_HEADER: note} if note else {}),
        }

    def _send_token_ids(self, replica: Any, tokens: PromptTokens | None) -> str | None:
        """Hand the ids to the chosen engine, so that it does not tokenise again; best effort."""
        endpoint = ray_internals.token_endpoint(replica)
        if tokens is None or tokens.payload is None or endpoint is None:
            return None
        key = uuid.uuid4().hex
        return key if self._token_sender.push(endpoint, key, tokens.payload) else None
