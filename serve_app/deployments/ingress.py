"""The routing step: HAProxy posts each request's body here and streams to the replica that the answer names.

Nothing here raises: a body that can't be parsed, tokenised or is cut short is routed by load alone, so that a client's
error is answered by vLLM in its own words and never turned into a 503 by the routing step.
"""

import asyncio
import gc
import json
import logging
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
from serve_app.deployments.start_error import start_error
from serve_app.environment import check_environment
from serve_app.observability.metrics import RoutingMetrics
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router import ray_internals
from serve_app.router.block_hashes import seed_fingerprint
from serve_app.router.lifecycle import LifecycleBatch
from serve_app.router.live_routing import LiveRouting, share_routing_state
from serve_app.router.routing_state import RouteRequest

logger = logging.getLogger("ray.serve")

BODY_TRUNCATED_HEADER = "x-body-truncated"
PUBLISH_EVERY_S = 5.0

ingress_app = FastAPI(openapi_url=None)


# These stand above the class because `serve.ingress` pickles the routes while the class is being made.


def _parse(body: bytes, *, truncated: bool) -> dict[str, Any] | None:
    if truncated or not body:
        return None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    # vLLM's renderer would take a client's token ids from here, and they would travel on as trusted.
    parsed.pop("kv_transfer_params", None)
    return parsed


def _untokenisable(body: dict[str, Any] | None) -> str | None:
    if body is None:
        return "no JSON object"
    if "messages" not in body and "prompt" not in body:
        return "neither messages nor prompt"
    return None


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
        self._max_bytes = config.ingress.max_tokenise_bytes
        self._untokenised: dict[str, int] = {}
        table = config.engine.policy.prefill_profile
        profile = PrefillProfile(table) if table else PrefillProfile.flat()
        self._live = LiveRouting(config.router, profile)
        # The router of this process' handle looks the state up when the handle is initialised.
        share_routing_state(str(server.deployment_id), self._live)
        self._tokenizer = await asyncio.to_thread(ray_internals.Tokenizer, llm_config)
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
        raw = await request.body()
        # A body that is too long to tokenise is not parsed either: this loop also answers everybody else.
        too_long = len(raw) > self._max_bytes
        body = None if too_long else _parse(raw, truncated=BODY_TRUNCATED_HEADER in request.headers)
        token_ids = await self._tokenise(body, too_long)
        route_request = self._route_request(body, token_ids)
        replica = await ray_internals.pick_replica(self._handle, token_ids, route_request)
        address = ray_internals.http_address(replica)
        if address is None:
            self._live.state.expire(route_request.request_id, time.time())
            return JSONResponse({"detail": "the chosen replica has no HTTP address yet"}, status_code=503)
        headers = self._trusted_headers(route_request.request_id)
        token_key = self._send_token_ids(replica, token_ids)
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
            "kv_events": asdict(self._live.subscriber.counters),
            "hash_seed": seed_fingerprint(),
        }

    async def _publish_forever(self) -> None:
        metrics = RoutingMetrics()
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            try:
                metrics.publish(await self.state())
            except Exception:  # a metric must never take routing down
                logger.exception("Publishing metrics failed; trying again in %s s", PUBLISH_EVERY_S)

    async def _tokenise(self, body: dict[str, Any] | None, too_long: bool) -> list[int] | None:
        """Prompt token ids of a chat or single-prompt body; None where the request is routed by load."""
        reason = "body too long" if too_long else _untokenisable(body)
        if reason is None:
            try:
                token_ids: list[int] | None = await self._tokenizer.tokenize(body)
                if token_ids:
                    return token_ids
                reason = "not one text prompt"
            except Exception as error:  # the client's mistake or a template's: vLLM answers it
                reason = type(error).__name__
        self._untokenised[reason] = self._untokenised.get(reason, 0) + 1
        return None

    def _route_request(self, body: dict[str, Any] | None, token_ids: list[int] | None) -> RouteRequest:
        salt = body.get("cache_salt") if body else None
        hashes = self._live.hashes(token_ids, salt if isinstance(salt, str) else None) if token_ids else ()
        return RouteRequest(uuid.uuid4().hex, len(token_ids or ()), hashes)

    def _trusted_headers(self, request_id: str) -> dict[str, str]:
        record = self._live.state.decisions.get(request_id)
        if record is None:
            return {}
        decision = record.decision
        return {
            middleware.ID_HEADER: request_id,
            middleware.PREDICTED_HEADER: f"{decision.predicted_s * 1e3:.1f}",
            middleware.HIT_HEADER: str(decision.hit_tokens),
            middleware.SERVICE_HEADER: f"{decision.service_s * 1e3:.3f}",
        }

    def _send_token_ids(self, replica: Any, token_ids: list[int] | None) -> str | None:
        """Hand the ids to the chosen engine, so that it does not tokenise again; best effort."""
        endpoint = ray_internals.token_endpoint(replica)
        if not token_ids or endpoint is None:
            return None
        key = uuid.uuid4().hex
        payload = ray_internals.encode_prompt_token_ids(token_ids)
        return key if self._token_sender.push(endpoint, key, payload) else None
