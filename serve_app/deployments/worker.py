"""One replica: Ray Serve LLM's server around one vLLM engine, with our ports, our trace and our middleware.

Usable alone in an existing Ray Serve LLM application as `server_cls`; without an ingress of ours beside it, its
life-cycle events find nobody and are dropped.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.metrics.loggers import StatLoggerBase

from serve_app.deployments.autoscaling import QUEUED_PREFILL_STAT
from serve_app.deployments.engine_config import is_emulated
from serve_app.deployments.event_forwarder import EngineLoad, EventForwarder
from serve_app.deployments.middleware import FairwayMiddleware
from serve_app.deployments.request_trace import traced_generate
from serve_app.deployments.start_error import start_error
from serve_app.observability.metrics import EngineMetrics, publish_emulated
from serve_app.policies import live_names
from serve_app.router import ray_internals
from serve_app.router.lifecycle import LifecycleBatch

logger = logging.getLogger("ray.serve")

BROADCAST_TIMEOUT_S = 3.0
ENGINE_METRICS_PERIOD_S = 5.0
ENGINE_DEATH_SEEN_WITHIN_S = 0.5
LAST_ANSWERS_WITHIN_S = 2.0
"""A dead engine's open requests get their errors at once; a client that doesn't read its own is not waited for."""
WARM_UP_PROMPT = list(range(1, 9))
"""Token ids that every vocabulary has, too few to fill a KV block."""


class FairwayEngine(ray_internals.VLLMEngine):  # type: ignore[misc]  # Ray's private classes are untyped
    """Ray's vLLM engine on free ports, with `generate` traced."""

    def __init__(self, llm_config: Any) -> None:
        super().__init__(llm_config)
        replica_id = serve.get_replica_context().replica_id.unique_id
        ray_internals.use_free_ports(self, replica_id, ray.util.get_node_ip_address())
        self.load = EngineLoad(self._queued_tokens)

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
        follow_counts(client, self.load)
        return client

    async def _queued_tokens(self) -> int:
        return int((await ask_scheduler(self._engine_client, live_names.POLICY_STATS))["waiting_todo_tokens"])


class _CountsFollower(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM hands it every step's counts, in the process in front of the engine."""

    def __init__(self, load: EngineLoad) -> None:
        self._load = load

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._load.counted(scheduler_stats.num_running_reqs, waiting)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def follow_counts(engine_client: Any, load: EngineLoad) -> None:
    """Let `load` hear what every step of the engine counts; nothing comes where vLLM's statistics are switched off.

    Ray makes the `AsyncLLM` and leaves no room in its `stat_loggers`, so the logger joins those that are there.
    """
    if engine_client.logger_manager is not None:
        engine_client.logger_manager.stat_loggers.append(_CountsFollower(load))


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
        ray_internals.take_completion_ids(app)
        context = serve.get_replica_context()
        self._forwarder = EventForwarder(
            context.replica_id.unique_id, _broadcaster(context.app_name), engine_report=self.engine.load.report
        )
        self._forwarder.start()
        ray_internals._add_middleware_to_built_app(
            app, FairwayMiddleware, replica_id=context.replica_id.unique_id, forwarder=self._forwarder
        )
        publish_emulated(context.replica_id.unique_id, emulated=is_emulated(self._llm_config.engine_kwargs))
        metrics = EngineMetrics(context.replica_id.unique_id)
        loop = asyncio.get_running_loop()
        self._metrics_task = loop.create_task(self._publish_engine(metrics))
        self._end_task = loop.create_task(_end_with_engine(self.engine._engine_client, self._forwarder))
        return app

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `autoscaling.ReplicasForQueuedWork` scales on; Serve asks every replica for it."""
        forwarder = getattr(self, "_forwarder", None)
        return {QUEUED_PREFILL_STAT: forwarder.queued_prefill_s if forwarder else 0.0}

    async def _publish_engine(self, metrics: EngineMetrics) -> None:
        """Ask the engine every few seconds for as long as it answers."""
        with suppress(Exception):
            while True:
                metrics.publish(await self.engine_policy())
                await asyncio.sleep(ENGINE_METRICS_PERIOD_S)

    async def engine_policy(self) -> dict[str, Any]:
        """The engine's policy in force, under `policy`, and what waits; see `FairwayScheduler.policy_stats`.

        Raises:
            RuntimeError: the engine is not scheduled by `FairwayScheduler`.
        """
        return await ask_scheduler(self.engine._engine_client, live_names.POLICY_STATS)

    async def change_engine_policy(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Set some of `config.LIVE_FIELDS` otherwise, from the engine's next step on.

        Returns: as `engine_policy`, with the changes in force.
        Raises:
            ValueError: in one line, with each bad field's name, its value and its bound; nothing is changed then.
            RuntimeError: the engine is not scheduled by `FairwayScheduler`.
        """
        return await ask_scheduler(self.engine._engine_client, live_names.CHANGE_POLICY, changes)


async def _end_with_engine(engine_client: Any, forwarder: EventForwarder) -> None:
    """End this process soon after its engine, so that Serve replaces it.

    Without an engine it only answers errors, at once, which makes it the least loaded of all. Serve's health check
    needs three failures, about half a minute; the end of a process it sees in seconds.
    """
    while not engine_client.errored:  # noqa: ASYNC110  # vLLM has nothing to wait for
        await asyncio.sleep(ENGINE_DEATH_SEEN_WITHIN_S)
    logger.error("The engine died; this replica ends once its %d open requests know", len(forwarder.open_ids))
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_ANSWERS_WITHIN_S):
            await forwarder.drained()
    os._exit(1)


async def ask_scheduler(engine_client: Any, utility: str, *args: Any) -> dict[str, Any]:
    """Call a utility of the engine core, which vLLM runs between two steps.

    Raises:
        ValueError: what the utility refused, in its words.
        RuntimeError: the engine is not scheduled by `FairwayScheduler`.
    """
    try:
        answer: dict[str, Any] = await engine_client.engine_core.call_utility_async(utility, *args)
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
