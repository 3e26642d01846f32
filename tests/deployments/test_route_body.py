"""What the routing step makes of a body: it never raises, and says why it will not tokenise."""

import pytest

from serve_app.deployments.ingress import _parse, _untokenisable

CHAT = b'{"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": {"prompt_token_ids": [1]}}'


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"1", b"\xff\xfe", b'"x"', b"null", b"[" * 100_000, b"NaN"])
def test_body_that_is_no_object_is_routed_by_load(body: bytes) -> None:
    assert _parse(body, truncated=False) is None
    assert _untokenisable(None) == "no JSON object"


def test_truncated_body_is_routed_by_load_even_if_it_parses() -> None:
    assert _parse(CHAT, truncated=True) is None


def test_client_s_token_ids_never_reach_the_tokeniser() -> None:
    assert _parse(CHAT, truncated=False) == {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "reason"), [({"messages": []}, None), ({"prompt": "x"}, None), ({"input": "x"}, "neither")]
)
def test_body_needs_messages_or_a_prompt(body: dict[str, object], reason: str | None) -> None:
    said = _untokenisable(body)
    assert said is None if reason is None else reason in (said or "")
