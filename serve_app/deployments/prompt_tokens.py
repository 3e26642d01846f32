"""Prompt token ids as the engine itself would make them: made once, before routing and off the ingress' event loop.

A body is parsed, rendered by vLLM's own renderer, hashed and encoded in one of two lanes, each a thread with an event
loop and a renderer of its own. Long bodies have the second lane to themselves: a prompt of a megabyte takes most of a
second, and holds up neither this process' loop nor anybody's short prompt.

What can't be known ahead is no error: it comes back with a `Reason` and is routed by load alone.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jinja2

from serve_app.config import IngressSettings
from serve_app.deployments.route_body import (
    Reason,
    ids_replace_text,
    is_batch,
    lora_name,
    output_tokens,
    parsed_body,
    reason_against,
)
from serve_app.router import ray_internals
from serve_app.router.block_hashes import BlockHasher

logger = logging.getLogger("ray.serve")

BAD_INPUT = (ValueError, TypeError, LookupError, AttributeError, jinja2.TemplateError)
"""What vLLM's models and renderer raise on bad input, beside `VLLMClientError`."""
T = TypeVar("T")


class Untokenised(Exception):
    """The body's tokens can't be known ahead; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A body's prompts as the engine will see them."""

    num_prompts: int
    num_tokens: int
    """Of all its prompts together."""
    hashes: tuple[bytes, ...]
    """Keys of the full KV blocks of its first prompt; empty while the block size is unknown."""
    payload: bytes | None
    """Token ids that the engine may take in place of its own tokenising, encoded for the token channel; None where the
    answer would differ or nothing would be saved."""


@dataclass(frozen=True, slots=True)
class ReadBody:
    """What the routing step makes of a body: `tokens`, or the reason why there are none."""

    body: dict[str, Any] | None = None
    """The parsed object, without what only the ingress may say; None when there is none."""
    tokens: PromptTokens | None = None
    untokenised: Reason | None = None

    @property
    def output_tokens(self) -> int | None:
        """Most tokens the client asked for; None when it did not say."""
        return output_tokens(self.body) if self.body is not None else None


class PromptTokeniser:
    """The two lanes. `read` belongs to one event loop; it never raises on account of a body."""

    def __init__(self, llm_config: Any, model_id: str, settings: IngressSettings) -> None:
        """Blocks for seconds: it loads the tokeniser, twice, and renders once so that nobody waits for it later."""
        self._settings = settings
        self._short = Lane(BodyReader(PromptRenderer(llm_config), model_id), "fairway-tokenise-short")
        self._long = Lane(BodyReader(PromptRenderer(llm_config), model_id), "fairway-tokenise-long")

    async def read(self, raw: bytes, block_size_tokens: int | None, *, truncated: bool = False) -> ReadBody:
        """Parse, tokenise and hash `raw`; give up after `tokenise_timeout_s`.

        Args:
            raw: the request's body.
            block_size_tokens: the engines' KV block size; None while it is unknown, which hashes nothing.
            truncated: only the body's beginning is there.
        """
        if truncated:
            return ReadBody(untokenised="body cut short")
        if len(raw) > self._settings.max_tokenise_bytes:
            return ReadBody(untokenised="body too long")
        lane = self._long if len(raw) > self._settings.long_body_bytes else self._short
        try:
            work = lane.run(lane.reader.read(raw, block_size_tokens))
            return await asyncio.wait_for(work, self._settings.tokenise_timeout_s)
        except TimeoutError:
            return ReadBody(untokenised="not in time")

    def close(self) -> None:
        """Stop both lanes; whoever still waits is left to its timeout."""
        self._short.close()
        self._long.close()


class Lane:
    """A thread that runs an event loop, and the reader that belongs to it."""

    def __init__(self, reader: "BodyReader", name: str) -> None:
        self.reader = reader
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which runs in the lane; cancelling this cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BodyReader:
    """Everything that is made of a body, in one thread: the block hasher's memo allows no second one."""

    def __init__(self, renderer: "PromptRenderer", model_id: str) -> None:
        self._renderer = renderer
        self._model_id = model_id
        self._hasher: BlockHasher | None = None

    async def read(self, raw: bytes, block_size_tokens: int | None) -> ReadBody:
        """As `PromptTokeniser.read`, for a body that is whole and not too long."""
        body = parsed_body(raw)
        if body is None:
            return ReadBody(untokenised="no JSON object")
        reason = reason_against(body)
        if reason is not None:
            return ReadBody(body, untokenised=reason)
        try:
            # A copy, since vLLM's validators change the object that they are given.
            prompts = await self._renderer.prompts(dict(body))
        except Untokenised as error:
            return ReadBody(body, untokenised=error.reason)
        except Exception as error:
            return ReadBody(body, untokenised=_blame(error))
        return ReadBody(body, self._tokens(body, prompts, block_size_tokens))

    def _tokens(self, body: dict[str, Any], prompts: list[list[int]], block_size_tokens: int | None) -> PromptTokens:
        first, salt = prompts[0], body.get("cache_salt")
        hashes: tuple[bytes, ...] = ()
        if block_size_tokens is not None:
            if self._hasher is None or self._hasher.block_size_tokens != block_size_tokens:
                self._hasher = BlockHasher(block_size_tokens)
            adapter = lora_name(body, self._model_id)
            hashes = self._hasher.hashes(first, salt if isinstance(salt, str) else None, adapter)
        payload = ray_internals.encode_prompt_token_ids(first) if ids_replace_text(body) else None
        return PromptTokens(len(prompts), sum(map(len, prompts)), hashes, payload)


class PromptRenderer:
    """vLLM's own way from a body to token ids, with the deployment's model, chat template and tool settings."""

    def __init__(self, llm_config: Any) -> None:
        # vLLM is imported here and below, not above: the builder imports this module and needs none of it.
        self._online = ray_internals.online_renderer(llm_config)
        self._online.warmup()

    async def prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """Token ids of each prompt, as the engine's `prompt_token_ids`.

        Raises:
            Untokenised: vLLM would refuse the body, or a prompt is more than its tokens.
        """
        inputs = await self._completion(body) if "prompt" in body else await self._chats(body)
        return [_token_ids(one) for one in inputs]

    async def _completion(self, body: dict[str, Any]) -> Sequence[Any]:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        request = CompletionRequest.model_validate(body)
        inputs: Sequence[Any] = _accepted(await self._online.render_completion(request, skip_mm_cache=True))
        return inputs

    async def _chats(self, body: dict[str, Any]) -> Sequence[Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest

        if not is_batch(body["messages"]):
            return await self._chat(ChatCompletionRequest.model_validate(body))
        batch = BatchChatCompletionRequest.model_validate(body)
        chats = [await self._chat(batch.to_chat_completion_request(messages)) for messages in batch.messages]
        return [one for chat in chats for one in chat]

    async def _chat(self, request: Any) -> Sequence[Any]:
        _, inputs = _accepted(await self._online.render_chat(request, skip_mm_cache=True))
        return list(inputs)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _accepted(rendered: Any) -> Any:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    if isinstance(rendered, ErrorResponse):
        raise Untokenised("refused by vLLM")
    return rendered


def _token_ids(engine_input: Mapping[str, Any]) -> list[int]:
    if engine_input["type"] != "token":
        raise Untokenised("content other than text")
    ids: list[int] = engine_input["prompt_token_ids"]
    if not ids:
        raise Untokenised("refused by vLLM")
    return ids


def _blame(error: Exception) -> Reason:
    """The client's or its template's mistake, which vLLM answers in its own words; anything else is logged."""
    from vllm.exceptions import VLLMClientError

    if isinstance(error, (*BAD_INPUT, VLLMClientError)):
        return "refused by vLLM"
    logger.warning("A prompt could not be tokenised and is routed by load: %s: %s", type(error).__name__, error)
    return "tokeniser failed"
