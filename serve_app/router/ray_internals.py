"""The only file that touches names private to Ray: pinned to 2.60.0 and named one by one in the contract test.

`NAMES` lists what we import from private modules; attributes resolve on first use, because half of them load vLLM,
which Serve's controller and proxies must not pay for when they load the request router's class. The functions below
reach into Ray's objects on behalf of the rest of the package.
"""

import importlib
import socket
from collections.abc import Callable
from typing import Any

NAMES: dict[str, str] = {
    "KVAwareRouter": "ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router",
    "REQUEST_TOKEN_IDS_KWARG": "ray.llm._internal.serve.routing_policies.kv_aware.constants",
    "KV_TOKEN_KEY_HEADER": "ray.llm._internal.serve.routing_policies.kv_aware.constants",
    "KV_TOKEN_METADATA_KEY": "ray.llm._internal.serve.routing_policies.kv_aware.constants",
    "LLM_ROUTER_DEPLOYMENT_NAME": "ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker",
    "TokenSender": "ray.llm._internal.serve.routing_policies.kv_aware.token_channel",
    "TokenReceiver": "ray.llm._internal.serve.routing_policies.kv_aware.token_channel",
    "encode_prompt_token_ids": "ray.llm._internal.serve.routing_policies.kv_aware.token_channel",
    "Tokenizer": "ray.llm._internal.serve.routing_policies.kv_aware.vllm.tokenizer",
    "TokenizeError": "ray.llm._internal.serve.routing_policies.kv_aware.vllm.tokenizer",
    "LLMServer": "ray.llm._internal.serve.core.server.llm_server",
    "VLLMEngine": "ray.llm._internal.serve.engines.vllm.vllm_engine",
    "_add_middleware_to_built_app": "ray.llm._internal.serve.core.server.llm_server",
    "_build_direct_streaming_llm_deployment": "ray.llm._internal.serve.core.ingress.builder",
    "SERVE_INGRESS_ROUTER_HEADER_PREFIX": "ray.serve._private.constants",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_OPT_HEADERS_FIELD": "ray.serve._private.constants",
}
"""Private name -> the module that holds it."""

KV_EVENTS_STATS_KEY = "kv_event_metadata"
"""Key of a replica's routing stats under which `VLLMEngine.routing_stats` advertises its KV-event endpoints."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(NAMES[name]), name)


# --- what a request router sees of a replica -------------------------------------------------------------------------


def replica_unique_id(replica: Any) -> str:
    """The id of one incarnation of a replica; a restarted replica has another."""
    return str(replica.replica_id.unique_id)


def kv_event_endpoints(replica: Any) -> dict[str, Any] | None:
    """What the replica advertises: `endpoint`, `replay_endpoint`, `block_size`; None before its engine started."""
    stats: dict[str, Any] = replica.routing_stats or {}
    return stats.get(KV_EVENTS_STATS_KEY)


async def pick_replica(handle: Any, *args: Any) -> Any:
    """Let the deployment's own request router pick by `args`, which it finds in the pending request.

    No slot is reserved on the replica: HAProxy carries the request.
    """
    async with handle.choose_replica(*args, _reserve=False) as selection:
        return selection._replica


def http_address(replica: Any) -> tuple[str, int] | None:
    """Where HAProxy reaches the replica's own OpenAI server."""
    address: tuple[str, int] | None = replica.backend_http_endpoint
    return address


def full_replica_id(replica: Any) -> str:
    """The id that HAProxy's server map is keyed by."""
    return str(replica.replica_id.to_full_id_str())


def token_endpoint(replica: Any) -> str | None:
    """Where the replica takes prompt token ids, if it does."""
    channel = (replica.routing_stats or {}).get(__getattr__("KV_TOKEN_METADATA_KEY"))
    return channel.get("endpoint") if isinstance(channel, dict) else None


# --- what a replica needs of its engine ------------------------------------------------------------------------------


def use_free_ports(engine: Any, topic: str, node_address: str) -> None:
    """Give a not yet started `VLLMEngine` ports of its own, bound to the node's address, and its own event topic.

    Ray derives these ports from the replica's rank on its node, so two nodes on one host would collide, and binds all
    addresses. The topic is the replica's unique id: a subscriber that reconnects to another incarnation hears nothing.
    """
    events_port, replay_port, token_port = free_ports(3, node_address)
    engine.llm_config.update_engine_kwargs(
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://{_as_ipv6(node_address)}:{events_port}",
            "replay_endpoint": f"tcp://{node_address}:{replay_port}",
            "topic": topic,
        }
    )
    endpoint = f"tcp://{node_address}:{token_port}"
    engine._token_receiver = __getattr__("TokenReceiver")(bind_endpoint=endpoint, store=engine._prompt_token_store)
    engine._prompt_token_zmq_advertised_endpoint = endpoint


def _as_ipv6(address: str) -> str:
    """`address` in the form that vLLM's publisher binds instead of connecting to; see `FairwayScheduler`."""
    return f"[{address}]" if ":" in address else f"[::ffff:{address}]"


def silence_token_tracking(engine_client: Any) -> None:
    """Switch off Ray's own life-cycle broadcasts: ours carry status, times and cached tokens, theirs do not."""
    engine_client._resolve_lifecycle_forwarder = lambda: None


def wrap_generate(engine_client: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap(generate)` in place of the engine client's `generate`."""
    engine_client.generate = wrap(engine_client.generate)


GENERATING_HANDLERS = (
    ("openai_serving_chat", "create_chat_completion"),
    ("openai_serving_chat_batch", "create_batch_chat_completion"),
    ("openai_serving_completion", "create_completion"),
    ("openai_serving_responses", "create_responses"),
    ("anthropic_serving_messages", "create_messages"),
    ("cohere_serving_chat_v2", "create_chat_v2"),
    ("serving_tokens", "serve_tokens"),
)
"""vLLM's handlers by their name in `app.state`, with the method that takes a client's request first."""


def refuse_trusted_fields(app: Any) -> None:
    """Drop from clients' bodies what only the ingress or the operator may say, before Ray adds the ingress' token ids.

    `kv_transfer_params` is how trusted token ids reach vLLM beside the text: a client could pair one prompt with the
    tokens of another. `ec_transfer_params` is its like for encoders. `kv_cache_report_mode` re-announces cached blocks:
    a client could inflate the prefix index.
    """
    for serving_name, method in GENERATING_HANDLERS:
        serving = getattr(app.state, serving_name, None)
        if serving is not None:
            setattr(serving, method, _without_trusted_fields(getattr(serving, method)))


def _without_trusted_fields(create: Callable[..., Any]) -> Callable[..., Any]:
    async def create_without(request: Any, *args: Any, **kwargs: Any) -> Any:
        # Some of vLLM's request models keep unknown fields, and pass them on to one that knows them.
        for field in ("kv_transfer_params", "ec_transfer_params"):
            if getattr(request, field, None) is not None:
                setattr(request, field, None)
        given = getattr(request, "vllm_xargs", None)
        if isinstance(given, dict):
            given.pop("kv_cache_report_mode", None)
        return await create(request, *args, **kwargs)

    return create_without


def free_ports(count: int, address: str) -> list[int]:
    """`count` distinct TCP ports that were free on `address` a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((address, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def online_renderer(llm_config: Any) -> Any:
    """vLLM's renderer with the deployment's model and front-end arguments: what Ray's own tokeniser asks."""
    return __getattr__("Tokenizer")(llm_config)._renderer


def take_completion_ids(app: Any) -> None:
    """Let vLLM's completions handler use the ingress' token ids, as its chat handler does by itself.

    Ray puts them into `kv_transfer_params`, where vLLM 0.29 looks for them in chats only: a completion would be
    tokenised again, and its ids carried into the engine besides.
    """
    serving = getattr(app.state, "openai_serving_completion", None)
    if serving is not None:
        serving.render_completion_request = _with_ingress_ids(serving.render_completion_request)


def _with_ingress_ids(render: Callable[..., Any]) -> Callable[..., Any]:
    async def render_with_ids(request: Any) -> Any:
        ids = (request.kv_transfer_params or {}).pop("prompt_token_ids", None)
        if ids:
            request.prompt = ids
        return await render(request)

    return render_with_ids
