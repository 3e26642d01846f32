"""What a client may not say to the engine is dropped before the engine reads it."""

from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from serve_app.router.ray_internals import refuse_trusted_fields, take_completion_ids


class Serving:
    """Both of vLLM's handlers, remembering what they were given."""

    def __init__(self) -> None:
        self.given: Any = None

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> None:
        self.given = request

    async def create_completion(self, request: Any, raw_request: Any = None) -> None:
        self.given = request


FORGED = {"kv_transfer_params": {"prompt_token_ids": [1]}, "vllm_xargs": {"kv_cache_report_mode": "full", "mine": 1}}


async def test_chat_and_completion_lose_trusted_fields_and_keep_the_rest() -> None:
    serving = Serving()
    refuse_trusted_fields(SimpleNamespace(state=SimpleNamespace(openai_serving_chat=serving)))
    refuse_trusted_fields(SimpleNamespace(state=SimpleNamespace(openai_serving_completion=serving)))
    chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **FORGED})
    completion = CompletionRequest.model_validate({"prompt": "x", **FORGED})
    for create, request in ((serving.create_chat_completion, chat), (serving.create_completion, completion)):
        await create(request)
        assert serving.given.kv_transfer_params is None
        assert serving.given.vllm_xargs == {"mine": 1}


async def test_request_without_them_passes_unchanged() -> None:
    serving = Serving()
    refuse_trusted_fields(SimpleNamespace(state=SimpleNamespace(openai_serving_chat=serving)))
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
    before = request.model_copy(deep=True)
    await serving.create_chat_completion(request)
    assert serving.given == before


class Rendering:
    """vLLM's completions handler, remembering the prompt that it was to render."""

    def __init__(self) -> None:
        self.prompt: Any = None

    async def render_completion_request(self, request: Any) -> None:
        self.prompt = request.prompt


async def test_completion_is_rendered_from_the_ingress_ids_which_go_no_further() -> None:
    serving = Rendering()
    take_completion_ids(SimpleNamespace(state=SimpleNamespace(openai_serving_completion=serving)))
    request = CompletionRequest.model_validate({"prompt": "x"})
    request.kv_transfer_params = {"prompt_token_ids": [7, 8]}
    await serving.render_completion_request(request)
    assert serving.prompt == [7, 8]
    assert not request.kv_transfer_params


async def test_completion_without_ingress_ids_is_rendered_from_its_text() -> None:
    serving = Rendering()
    take_completion_ids(SimpleNamespace(state=SimpleNamespace(openai_serving_completion=serving)))
    await serving.render_completion_request(CompletionRequest.model_validate({"prompt": "x"}))
    assert serving.prompt == "x"
    take_completion_ids(SimpleNamespace(state=SimpleNamespace()))
