"""Every private name of Ray that we touch: an upgrade fails here first and says which one is gone."""

import inspect
from importlib.metadata import version

import pytest

from serve_app.router import ray_internals

PINNED = "2.60.0"


def test_ray_is_the_pinned_release() -> None:
    assert version("ray") == PINNED


@pytest.mark.parametrize("name", sorted(ray_internals.NAMES))
def test_private_name_exists(name: str) -> None:
    assert getattr(ray_internals, name) is not None


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ray_internals.no_such_name


@pytest.mark.parametrize(
    ("owner", "method", "parameters"),
    [
        ("KVAwareRouter", "initialize_state", []),
        ("KVAwareRouter", "update_replicas", ["replicas"]),
        ("KVAwareRouter", "choose_replicas", ["candidate_replicas", "pending_request"]),
        ("TokenSender", "push", ["endpoint", "key", "payload"]),
        ("TokenReceiver", "__init__", ["bind_endpoint", "store", "receive_queue_limit"]),
        ("Tokenizer", "__init__", ["llm_config"]),
        ("Tokenizer", "tokenize", ["payload"]),
        ("LLMServer", "__init__", ["llm_config", "engine_cls", "model_downloader"]),
        ("LLMServer", "__serve_build_asgi_app__", []),
        ("VLLMEngine", "__init__", ["llm_config"]),
        ("VLLMEngine", "routing_stats", []),
        (
            "VLLMEngine",
            "_start_async_llm_engine",
            ["vllm_engine_args", "vllm_engine_config", "placement_group"],
        ),
    ],
)
def test_private_method_takes_what_we_pass(owner: str, method: str, parameters: list[str]) -> None:
    signature = inspect.signature(getattr(getattr(ray_internals, owner), method))
    assert [name for name in signature.parameters if name != "self"] == parameters


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        ("VLLMEngine", "self._token_receiver"),
        ("VLLMEngine", "self._prompt_token_store"),
        ("VLLMEngine", "self._prompt_token_zmq_advertised_endpoint"),
        ("VLLMEngine", "self._routing_stats"),
        ("VLLMEngine", "self._engine_client"),
        ("LLMServer", "_default_engine_cls"),
        ("LLMServer", "self._llm_config"),
        ("LLMServer", "self.engine"),
        ("Tokenizer", "self._renderer = OnlineRenderer("),
    ],
)
def test_private_attribute_is_still_used_by_its_class(owner: str, text: str) -> None:
    assert text in inspect.getsource(getattr(ray_internals, owner))


def test_routing_stats_still_hold_the_event_endpoints() -> None:
    from ray.llm._internal.serve.routing_policies.kv_aware.vllm import kv_events

    source = inspect.getsource(kv_events.get_kv_event_routing_stats)
    assert f'"{ray_internals.KV_EVENTS_STATS_KEY}"' in source
    for key in ("endpoint", "replay_endpoint", "block_size"):
        assert f'"{key}":' in source


def test_event_publisher_still_binds_an_ipv4_address_written_as_ipv6() -> None:
    from vllm.distributed.kv_events import ZmqEventPublisher

    assert ray_internals._as_ipv6("10.0.0.7") == "[::ffff:10.0.0.7]"
    assert ray_internals._as_ipv6("fd00::7") == "[fd00::7]"
    assert 'or "::" in self._endpoint' in inspect.getsource(ZmqEventPublisher._socket_setup)


def test_token_tracking_is_silenced_by_an_absent_forwarder() -> None:
    from ray.llm._internal.serve.routing_policies.kv_aware.vllm import token_tracking

    source = inspect.getsource(token_tracking.enable_token_tracking)
    assert "forwarder = self._resolve_lifecycle_forwarder()" in source
    assert "if forwarder is None" in source


def test_pick_only_choice_reserves_no_slot() -> None:
    from ray.serve._private.router import AsyncioRouter

    source = inspect.getsource(AsyncioRouter.choose_replica)
    assert 'request_kwargs.pop("_reserve", True)' in source
    assert "_replica=replica" in source


def test_replica_wrapper_has_what_we_read() -> None:
    from ray.serve._private.request_router.replica_wrapper import RunningReplica

    for name in ("replica_id", "routing_stats", "backend_http_endpoint"):
        assert isinstance(getattr(RunningReplica, name), property), name


def test_handle_and_application_have_the_hooks_we_use() -> None:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

    for owner, name in (
        (DeploymentHandle, "choose_replica"),
        (DeploymentHandle, "broadcast"),
        (DeploymentHandle, "_init"),
        (Application, "_with_ingress_request_router"),
    ):
        assert hasattr(owner, name), name
    base = inspect.getsource(DeploymentHandle.__mro__[1])
    assert "self.deployment_id = " in base


def test_proxy_contract_of_the_routing_answer() -> None:
    """The Lua action reads `replica_id` and a flat string map, and strips a client's own trusted headers."""
    from pathlib import Path

    import ray.serve._private.haproxy_templates as templates
    from ray.serve._private import constants

    lua = Path(templates.__file__).with_name("ingress_request_router.lua.tmpl").read_text()
    assert "POST /internal/route" in lua
    assert '"replica_id"%s*:%s*"([^"]+)"' in lua
    assert '"request_headers"%s*:%s*{(.-)}' in lua
    assert (
        "http-request del-header {{ ingress_request_router_header_prefix }} -m beg" in templates.HAPROXY_CONFIG_TEMPLATE
    )
    assert constants.SERVE_INGRESS_ROUTER_HEADER_PREFIX == "x-serve-router-"
    assert constants.RAY_SERVE_INGRESS_REQUEST_ROUTER_OPT_HEADERS_FIELD == "request_headers"


def test_free_ports_are_distinct() -> None:
    ports = ray_internals.free_ports(20, "127.0.0.1")
    assert len(set(ports)) == 20


def test_completions_handler_renders_by_the_method_that_we_wrap() -> None:
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    assert "await self.render_completion_request(request)" in inspect.getsource(OpenAIServingCompletion)


@pytest.mark.parametrize("method", ["warmup", "render_chat", "render_completion"])
def test_renderer_has_the_methods_that_the_ingress_calls(method: str) -> None:
    from vllm.renderers.online_renderer import OnlineRenderer

    assert callable(getattr(OnlineRenderer, method))
