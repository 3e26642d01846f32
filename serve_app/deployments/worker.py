"""One replica: Ray Serve LLM's server around one vLLM engine, with our ports, our trace and our middleware.

Usable alone in an existing Ray Serve LLM application as `server_cls`; without an ingress of ours beside it, its
life-cycle events find nobody and are dropped.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from vllm.sampling_params import RequestOutputKind, SamplingParams

from serve_app.deployments.autoscaling import QUEUED_PREFILL_STAT
from serve_app.deployments.engine_config import is_emulated
from serve_app.deployments.event_forwarder import EventForwarder
from serve_app.deployments.middleware import FairwayMiddleware
from serve_app.deployments.request_trace import traced_generate
from serve_app.deployments.start_error import start_error
from serve_app.observability.metrics import EngineMetrics, publish_emulated
from serve_app.policies import live_names
from serve_app.router import ray_internals
from serve_app.router.lifecycle import LifecycleBatch

BROADCAST_TIMEOUT_S = 3.0
ENGINE_METRICS_PERIOD_S = 5.0
WARM_UP_PROMPT = list(range(1, 9))
"""Token ids that every vocabulary has, too few to fill a KV block."""


class FairwayEngine(ray_internals.VLLMEngine):  # type: ignore[misc]  # Ray's private classes are untyped
    """Ray's vLLM engine on free ports, with `generate` traced."""

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        replica_id = serve.get_replica_context().replica_id.unique_id
        ray_internals.use_free_ports(self, replica_id, ray.util.get_node_ip_address())

    async def start(self) -> None:
        """Start, and compute once, so that no user waits for what the first step compiles (seconds on a CPU)."""
        await super().start()
        for number, temperature in enumerate((0.0, 1.0)):
            sampling = SamplingParams(max_tokens=2, temperature=temperature, output_kind=RequestOutputKind.FINAL_ONLY)
            prompt = {"prompt_token_ids": WARM_UP_PROMPT}
            async for _ in self._engine_client.generate(prompt, sampling, f"fairway-warm-up-{number}"):
                pass

    def _start_async_llm_engine(self, *args: Any) -> Any:
        client = super()._start_async_llm_engine(*args)
        ray_internals.silence_token_tracking(client)
        ray_internals.wrap_generate(client, traced_generate)
        return client


class FairwayServer(ray_internals.LLMServer):  # type: ignore[misc]  # Ray's private classes are untyped
    """The deployment that serves the OpenAI API of one engine."""

    _default_engine_cls = FairwayEngine

    async def __init__(self, llm_config: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        try:
            await super().__init__(llm_config, **kwargs)
        except Exception as error:
            raise start_error(error) from None

    async def __serve_build_asgi_app__(self) -> Any:
        app = await super().__serve_build_asgi_app__()
        ray_internals.refuse_trusted_fields(app)
        context = serve.get_replica_context()
        self._forwarder = EventForwarder(context.replica_id.unique_id, _broadcaster(context.app_name))
        self._forwarder.start()
        ray_internals._add_middleware_to_built_app(
            app, FairwayMiddleware, replica_id=context.replica_id.unique_id, forwarder=self._forwarder
        )
        publish_emulated(context.replica_id.unique_id, emulated=is_emulated(self._llm_config.engine_kwargs))
        metrics = EngineMetrics(context.replica_id.unique_id)
        self._metrics_task = asyncio.get_running_loop().create_task(self._publish_engine(metrics))
        return app

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `autoscaling.ReplicasForQueuedWork` scales on; Serve asks every replica for it."""
        forwarder = getattr(self, "_forwarder", None)
        return {QUEUED_PREFILL_STAT: forwarder.queued_prefill_s if forwarder else 0.0}

    async def _publish_engine(self, metrics: EngineMetrics) -> None:
        """Ask the engine every few seconds for as long as it answers; a dead one is Serve's to find and replace."""
        with suppress(Exception):
            while True:
                metrics.publish(await self.engine_policy())
                await asyncio.sleep(ENGINE_METRICS_PERIOD_S)

    async def engine_policy(self) -> dict[str, Any]:
        """The engine's policy in force, under `policy`, and what waits; see `FairwayScheduler.policy_stats`.

        Raises:
            RuntimeError: the engine is not scheduled by `FairwayScheduler`.
        """
        return await self._ask_scheduler(live_names.POLICY_STATS)

    async def change_engine_policy(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Set some of `config.LIVE_FIELDS` otherwise, from the engine's next step on.

        Returns: as `engine_policy`, with the changes in force.
        Raises:
            ValueError: in one line, with each bad field's name, its value and its bound; nothing is changed then.
            RuntimeError: the engine is not scheduled by `FairwayScheduler`.
        """
        return await self._ask_scheduler(live_names.CHANGE_POLICY, changes)

    async def _ask_scheduler(self, utility: str, *args: Any) -> dict[str, Any]:
        """Call a utility of the engine core, which vLLM runs between two steps."""
        core = self.engine._engine_client.engine_core
        try:
            answer: dict[str, Any] = await core.call_utility_async(utility, *args)
        except Exception as error:
            raise _utility_error(utility, error) from None
        return answer


def _utility_error(utility: str, error: Exception) -> Exception:
    """What to raise for `error`: vLLM carries only the message of what was raised inside the engine."""
    prefix = f"Call to {utility} method failed: "
    message = str(error)
    if not message.startswith(prefix):
        return error  # the engine is dead, or was asked too late
    if "has no attribute" in message:
        return RuntimeError("the engine has no policy of ours: its scheduler_cls is not FairwayScheduler")
    return ValueError(message.removeprefix(prefix))


def _broadcaster(app_name: str) -> Callable[[LifecycleBatch], Awaitable[None]]:
    """Send a batch to every replica of the ingress in this application."""
    handle = serve.get_deployment_handle(ray_internals.LLM_ROUTER_DEPLOYMENT_NAME, app_name=app_name)

    async def send(batch: LifecycleBatch) -> None:
        response = handle.broadcast("on_fairway_events", batch)
        results = await response.results_async(timeout_s=BROADCAST_TIMEOUT_S, return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise failures[0]

    return send
