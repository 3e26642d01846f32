"""Admin application: the routing document and what the ingress replicas know.

It is no part of the request path. Every change is durable before it is pushed, and the newest document is pushed again
every second, so that an ingress that starts late or was restarted is right again without knowing of this application.
"""

import asyncio
import secrets
import time
from contextlib import suppress
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Path
from fastapi.responses import FileResponse
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app import dashboard
from serve_app.config import ControlConfig, RoutingDocument
from serve_app.deployments.control_token import kept_token
from serve_app.deployments.merged_state import merged_state
from serve_app.deployments.start_error import start_error
from serve_app.deployments.weights_store import LostRace, WeightsStore
from serve_app.router import ray_internals

PUSH_EVERY_S = 1.0
ANSWER_TIMEOUT_S = 3.0

control_app = FastAPI(title="fairway-serve control")


@serve.ingress(control_app)
class FairwayControl:
    """One replica; several would race for the same file."""

    def __init__(self, config: ControlConfig) -> None:
        try:
            self._start(config)
        except Exception as error:
            raise start_error(error) from None

    def _start(self, config: ControlConfig) -> None:
        state_dir = config.state_dir.expanduser()
        self._store = WeightsStore(state_dir / "weights.sqlite3")
        self._token = config.token or kept_token(state_dir)
        self._serving_app = config.serving_app
        self._ingress: DeploymentHandle[Any] | None = None
        self._document = self._store.latest()
        self._push_task: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Serve calls this from the start; the pusher needs the replica's running loop."""
        if self._push_task is None or self._push_task.done():
            self._push_task = asyncio.get_running_loop().create_task(self._push_forever())

    def _require_token(self, authorization: Annotated[str, Header()] = "") -> None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(token.encode(), self._token.encode()):
            raise HTTPException(
                401,
                "changes need `Authorization: Bearer TOKEN`; the token is control's setting `token`, "
                "or was printed once in the log of the control replica",
            )

    @control_app.get("/")
    async def page(self) -> FileResponse:
        """The dashboard."""
        return FileResponse(dashboard.PAGE)

    @control_app.get("/weights")
    async def weights(self) -> RoutingDocument:
        """The document in force."""
        return await self._current()

    @control_app.put("/weights")
    async def put_weights(
        self, document: RoutingDocument, authorization: Annotated[str, Header()] = ""
    ) -> RoutingDocument:
        """Replace router and weights; `version` is the one that was read, 409 when it is no longer the newest."""
        self._require_token(authorization)
        current = await self._current()
        if document.version != current.version:
            raise HTTPException(409, f"version {document.version} was read, but {current.version} is in force")
        try:
            saved = await asyncio.to_thread(
                self._store.save, document.router, document.weights, document.version, time.time()
            )
        except LostRace as error:
            raise HTTPException(409, str(error)) from error
        self._document = saved
        with suppress(HTTPException):  # it is durable; whoever is away gets it from a later push
            await self._push()
        return saved

    @control_app.get("/state")
    async def state(self) -> dict[str, Any]:
        """Replicas, load, index, residual and the last decisions, over all ingress replicas."""
        return merged_state(await self._ask_all("state"))

    @control_app.get("/decisions/{request_id}")
    async def decision(self, request_id: Annotated[str, Path(max_length=100)]) -> dict[str, Any]:
        """Why a request went where it went, and what came of it; the answer's `x-fairway-request-id` names it.

        404 when no ingress remembers it.
        """
        found = [answer for answer in await self._ask_all("explain", request_id) if answer is not None]
        if not found:
            raise HTTPException(
                404,
                f"no ingress remembers a decision for {request_id!r}; give the x-fairway-request-id of an answer, "
                "soon: each ingress keeps its last `router.decisions_kept` decisions only",
            )
        explanation: dict[str, Any] = found[0]
        return explanation

    async def _current(self) -> RoutingDocument:
        """The newest document; until the first change it is the ingress' own, which a redeployment may replace."""
        if self._document is not None:
            return self._document
        routing = max(await self._ask_all("state"), key=lambda state: int(state["version"]))
        return RoutingDocument.model_validate({key: routing[key] for key in ("version", "router", "weights")})

    async def _push_forever(self) -> None:
        while True:
            with suppress(Exception):  # no ingress is running; the next round tries again
                await self._push()
            await asyncio.sleep(PUSH_EVERY_S)

    async def _push(self) -> None:
        if self._document is not None:
            await self._ask_all("apply_routing", self._document)

    def _handle(self) -> DeploymentHandle[Any]:
        """The ingress; looked up when it is first needed, since the serving application may be deployed later."""
        if self._ingress is None:
            self._ingress = serve.get_deployment_handle(
                ray_internals.LLM_ROUTER_DEPLOYMENT_NAME, app_name=self._serving_app
            )
        return self._ingress

    async def _ask_all(self, method: str, *args: Any) -> list[Any]:
        try:
            response = self._handle().broadcast(method, *args)
            answers = await response.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            raise HTTPException(503, f"no ingress replica can be reached: {error}") from error
        good = [answer for answer in answers if not isinstance(answer, Exception)]
        if not good:
            raise HTTPException(503, f"no ingress replica answered within {ANSWER_TIMEOUT_S} s")
        return good
