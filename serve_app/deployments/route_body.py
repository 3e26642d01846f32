"""What the routing step reads of a request's body before anything is tokenised; pure.

It sees the body alone, not the path: HAProxy forwards none. So a body that two endpoints would read differently is left
to be routed by load.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

Reason = Literal[
    "body too long",
    "body cut short",
    "no JSON object",
    "no messages or prompt",
    "messages and prompt",
    "another API",
    "prompt embeddings",
    "content other than text",
    "refused by vLLM",
    "not in time",
    "tokeniser failed",
]
"""Why a body was routed without its tokens."""
REASONS: tuple[Reason, ...] = get_args(Reason)
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
"""Types of content parts that are text and nothing else, as vLLM tells them apart."""
MAX_OUTPUT_TOKENS = 1_000_000
"""Greater wishes than this count as this; vLLM refuses them by the model's length."""


def parsed_body(raw: bytes) -> dict[str, Any] | None:
    """The JSON object in `raw`, without `kv_transfer_params`; None when there is none.

    vLLM's renderer would take a client's token ids from that field, and they would travel on as trusted.
    """
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    parsed.pop("kv_transfer_params", None)
    return parsed


def reason_against(body: Mapping[str, Any]) -> Reason | None:
    """Why `body` must not be tokenised here; None when it may.

    Images and the like are found before rendering, which would fetch them.
    """
    has_messages, has_prompt = "messages" in body, "prompt" in body
    if body.get("prompt_embeds") is not None:
        return "prompt embeddings"
    if not has_messages and not has_prompt:
        return "no messages or prompt"
    if has_messages and has_prompt:
        return "messages and prompt"
    if "system" in body:  # Anthropic's place for it
        return "another API"
    return "content other than text" if has_messages and not _is_text(body["messages"]) else None


def ids_replace_text(body: Mapping[str, Any]) -> bool:
    """Whether the engine answers the same when it is given the prompt's ids instead of its text, and saves work by it.

    Not for batches (the channel carries one prompt) nor for ids, and not where the answer repeats the prompt's text.
    """
    if body.get("echo") or body.get("return_prompt_text"):
        return False
    return isinstance(body["prompt"], str) if "prompt" in body else not is_batch(body["messages"])


def output_tokens(body: Mapping[str, Any]) -> int | None:
    """Most tokens the client asked for; None when it did not say."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return min(value, MAX_OUTPUT_TOKENS)
    return None


def lora_name(body: Mapping[str, Any], model_id: str) -> str | None:
    """The LoRA adapter that `body` names as its model, which separates its KV blocks; None for the model itself."""
    model = body.get("model")
    return model if isinstance(model, str) and model not in ("", model_id) else None


def is_batch(messages: Any) -> bool:
    """Whether `messages` holds several chats, as `/v1/chat/completions/batch` takes them."""
    return isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)


def _is_text(messages: Any) -> bool:
    """False when any content part is, or may be, more than text. What is no message at all is vLLM's to refuse."""
    if not isinstance(messages, list):
        return True
    chats = messages if is_batch(messages) else [messages]
    contents = [one.get("content") for chat in chats if isinstance(chat, list) for one in chat if isinstance(one, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return all(_is_text_part(part) for part in parts)


def _is_text_part(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if kind is None or "uuid" in part:  # vLLM then goes by the other fields
        return set(part) <= {"text"}
    return isinstance(kind, str) and kind in TEXT_PARTS
