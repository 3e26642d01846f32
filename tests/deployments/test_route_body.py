"""What the routing step reads of a body: it never raises, and says why it will not tokenise."""

from typing import Any

import pytest

from serve_app.deployments.route_body import (
    MAX_OUTPUT_TOKENS,
    REASONS,
    ids_replace_text,
    lora_name,
    output_tokens,
    parsed_body,
    reason_against,
)

CHAT = b'{"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"prompt_token_ids": [1]}}'
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"1", b"\xff\xfe", b'"x"', b"null", b"[" * 100_000, b"NaN"])
def test_body_that_is_no_object_is_none(body: bytes) -> None:
    assert parsed_body(body) is None


def test_client_s_token_ids_never_reach_the_tokeniser() -> None:
    assert parsed_body(CHAT) == {"messages": [USER]}


def _content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [USER]}, None),
        ({"prompt": "x"}, None),
        ({"prompt": [1, 2]}, None),
        ({"messages": "hello"}, None),
        ({"messages": [1, None, [USER]]}, None),
        ({"messages": [[USER], [USER]]}, None),
        (_content({"type": "text", "text": "a"}, "b", {"text": "c"}), None),
        ({"input": "x"}, "no messages or prompt"),
        ({}, "no messages or prompt"),
        ({"messages": [USER], "prompt": "x"}, "messages and prompt"),
        ({"messages": [USER], "system": "Be brief.", "max_tokens": 3}, "another API"),
        ({"prompt_embeds": "AAAA"}, "prompt embeddings"),
        ({"prompt": "x", "prompt_embeds": ["AAAA"]}, "prompt embeddings"),
        ({"prompt": "x", "prompt_embeds": None}, None),
        (_content({"type": "image_url", "image_url": {"url": "http://x"}}), "content other than text"),
        (_content({"image_url": "http://x"}), "content other than text"),
        (_content({"type": "text", "text": "a", "uuid": "1"}), "content other than text"),
        (_content({"type": 3}), "content other than text"),
        ({"messages": [[USER], _content({"type": "input_audio"})["messages"]]}, "content other than text"),
    ],
)
def test_reason_names_what_can_not_be_known_ahead(body: dict[str, Any], reason: str | None) -> None:
    assert reason_against(body) == reason
    assert reason is None or reason in REASONS


@pytest.mark.parametrize(
    ("body", "replaces"),
    [
        ({"messages": [USER]}, True),
        ({"prompt": "x"}, True),
        ({"prompt": "x", "echo": False}, True),
        ({"messages": [USER], "echo": True}, False),
        ({"messages": [USER], "return_prompt_text": True}, False),
        ({"messages": [[USER]]}, False),
        ({"prompt": "x", "echo": True}, False),
        ({"prompt": ["x"]}, False),
        ({"prompt": [1, 2]}, False),
    ],
)
def test_ids_travel_only_where_the_answer_stays_the_same(body: dict[str, Any], replaces: bool) -> None:
    assert ids_replace_text(body) is replaces


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 7, "max_completion_tokens": None}, 7),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": -1}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "7"}, None),
        ({"max_tokens": 7.5}, None),
        ({"max_tokens": 10**400}, MAX_OUTPUT_TOKENS),
    ],
)
def test_output_tokens_are_what_the_client_asked_for(body: dict[str, Any], tokens: int | None) -> None:
    assert output_tokens(body) == tokens


@pytest.mark.parametrize(
    ("model", "adapter"), [("base", None), (None, None), ("", None), (5, None), ("my-adapter", "my-adapter")]
)
def test_model_other_than_the_served_one_is_an_adapter(model: Any, adapter: str | None) -> None:
    assert lora_name({"model": model}, "base") == adapter
    assert lora_name({}, "base") is None
