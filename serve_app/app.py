"""The two Serve application builders; they wire the rooms together and do nothing else.

This module must not use `from __future__ import annotations`: Serve reads the builders' argument type at run time, and
silently skips validation when it finds a string.
"""

import os

from ray import serve
from ray.serve import Application

from serve_app.config import ControlConfig, FairwayServeConfig
from serve_app.environment import check_environment


def build(config: FairwayServeConfig) -> Application:
    """The serving application: replicas of one model behind the routing step."""
    check_environment(os.environ)
    # Imported here, after the check: these modules load vLLM, and Ray reads its mode when it is imported.
    from serve_app.deployments.engine_config import llm_config, with_profile
    from serve_app.deployments.ingress import FairwayIngress
    from serve_app.deployments.worker import FairwayServer
    from serve_app.router import ray_internals

    config = with_profile(config)
    llm = llm_config(config)
    server = ray_internals._build_direct_streaming_llm_deployment(llm, deployment_cls=FairwayServer)
    # No CPU of its own, so that it runs beside Serve's proxy on any node; the hash seed must be the engines'.
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {**config.engine.env, "PYTHONHASHSEED": "0"}}}
    ingress = serve.deployment(
        FairwayIngress,
        name=ray_internals.LLM_ROUTER_DEPLOYMENT_NAME,
        max_ongoing_requests=1_000,
        ray_actor_options=options,
        # Life-cycle events arrive many times a second; their access log would drown everything else.
        logging_config={"enable_access_log": False},
    ).bind(server=server, llm_config=llm, config=config)
    return server._with_ingress_request_router(ingress)


def build_control(config: ControlConfig) -> Application:
    """The admin application: weights, state and the dashboard."""
    from serve_app.deployments.control import FairwayControl

    # On the head node: a worker may be scaled away, and the history in its file system with it.
    options = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    return serve.deployment(FairwayControl, num_replicas=1, ray_actor_options=options).bind(config)
