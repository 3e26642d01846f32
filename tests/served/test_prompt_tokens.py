"""The ingress' tokens are the engine's own: each body goes to one engine directly, which tokenises it by itself, to the
ingress' tokeniser alone, and through the whole application.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_app.config import FairwayServeConfig, IngressSettings
from serve_app.deployments.engine_config import llm_config, with_profile
from serve_app.deployments.prompt_tokens import PromptTokeniser
from serve_app.local_cluster import LocalCluster
from serve_app.local_ray import PROXY_DIR
from serve_app.router import wishes
from serve_app.router.block_hashes import BlockHasher
from serve_app.router.ray_internals import encode_prompt_token_ids
from tests.served.conftest import State, local_config

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.usefixtures("nothing_left_open")]

MODEL = "smollm2-135m-instruct"
BLOCK_TOKENS = 32
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The river rises in spring; clause 7 sets the limit at 9 metres. ¿Qué más? 河"
USER = {"role": "user", "content": TEXT}
SYSTEM = {"role": "system", "content": "Answer in one word."}
SAID = {"role": "assistant", "content": "The limit is"}
PARTS = {"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "Be sure."}]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
CALLED = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "9"},
]
IDS = [504, 1018, 2, 33, 7042] * 9

BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER]}),
    (CHAT, {"messages": [SYSTEM, USER]}),
    (CHAT, {"messages": [SYSTEM, USER, SAID, USER]}),
    (CHAT, {"messages": [PARTS]}),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}),
    (CHAT, {"messages": CALLED}),
    (CHAT, {"messages": [USER], "add_generation_prompt": False}),
    (CHAT, {"messages": [USER, SAID], "add_generation_prompt": False, "continue_final_message": True}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False, "style": "x"}}),
    (CHAT, {"messages": [USER], "add_special_tokens": True}),
    (CHAT, {"messages": [USER], "truncate_prompt_tokens": 12}),
    (CHAT, {"messages": [USER], "truncate_prompt_tokens": 12, "truncation_side": "left"}),
    (CHAT, {"messages": [USER, SAID], "echo": True, "add_generation_prompt": False, "continue_final_message": True}),
    (CHAT, {"messages": [USER], "return_prompt_text": True}),
    (CHAT, {"messages": [USER], "documents": [{"title": "River", "text": "It rises."}], "cache_salt": "s"}),
    (COMPLETIONS, {"prompt": TEXT}),
    (COMPLETIONS, {"prompt": TEXT, "add_special_tokens": False}),
    (COMPLETIONS, {"prompt": TEXT, "truncate_prompt_tokens": 12, "truncation_side": "right"}),
    (COMPLETIONS, {"prompt": TEXT, "echo": True}),
    (COMPLETIONS, {"prompt": TEXT, "n": 2, "temperature": 0.5}),
    (COMPLETIONS, {"prompt": IDS}),
    (COMPLETIONS, {"prompt": [TEXT, "short", TEXT + TEXT]}),
    (COMPLETIONS, {"prompt": [IDS, IDS[:3]]}),
    (COMPLETIONS, {"prompt": ["one"]}),
]


@pytest.fixture(scope="module")
def engine(cluster: LocalCluster) -> Iterator[httpx.Client]:
    """One replica's own OpenAI server, without HAProxy and ingress before it."""
    (proxy,) = (cluster.run_dir / PROXY_DIR).rglob("haproxy.cfg")
    address = re.findall(r"server SERVE_REPLICA_\S*FairwayServer\S* (127\.0\.0\.1:\d+)", proxy.read_text())[0]
    with httpx.Client(base_url=f"http://{address}", timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokeniser(cluster: LocalCluster) -> Iterator[PromptTokeniser]:
    config = with_profile(FairwayServeConfig.model_validate(local_config(cluster)["applications"][0]["args"]))
    settings = IngressSettings().model_copy(update={"tokenise_timeout_s": 60.0})  # however slow the machine
    made = PromptTokeniser(llm_config(config), config.model.id, settings)
    yield made
    made.close()


def _prompts(answer: httpx.Response, fields: dict[str, Any]) -> list[list[int]]:
    """The ids that the engine computed, one list a prompt."""
    assert answer.status_code == 200, answer.text
    told = answer.json()
    if "prompt_token_ids" in told:
        return [told["prompt_token_ids"]]
    choices = sorted(told["choices"], key=lambda choice: int(choice["index"]))
    return [choice["prompt_token_ids"] for choice in choices[:: fields.get("n", 1)]]


@pytest.mark.parametrize(("path", "fields"), BODIES)
def test_ingress_makes_the_engine_s_own_tokens(
    engine: httpx.Client, http: httpx.Client, tokeniser: PromptTokeniser, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "return_token_ids": True, **fields}
    alone = _prompts(engine.post(path, json=body), fields)
    tokens = asyncio.run(tokeniser.read(json.dumps(body).encode(), BLOCK_TOKENS)).tokens
    assert tokens is not None
    assert (tokens.num_prompts, tokens.num_tokens) == (len(alone), sum(map(len, alone)))
    assert tokens.hashes == BlockHasher(BLOCK_TOKENS).hashes(alone[0], fields.get("cache_salt"))
    assert tokens.payload in (None, encode_prompt_token_ids(alone[0]))
    through = http.post(path, json=body)
    assert _prompts(through, fields) == alone
    decision = http.get(f"/fairway/decisions/{through.headers['x-fairway-request-id']}").json()
    assert decision["prompt_tokens"] == tokens.num_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}),
        (CHAT, {"messages": [USER], "tools": [TOOL]}),
        (COMPLETIONS, {"prompt": TEXT, "suffix": "and so on"}),
        (COMPLETIONS, {"prompt": "x", "prompt_embeds": "AAAA"}),
    ],
)
def test_what_can_not_be_tokenised_is_counted_and_answered_by_vllm(
    engine: httpx.Client, http: httpx.Client, state: State, path: str, body: dict[str, Any]
) -> None:
    counted = _untokenised(state())
    alone, through = (client.post(path, json={"model": MODEL, **body}) for client in (engine, http))
    assert through.status_code == alone.status_code == 400
    assert through.json()["error"]["message"] == alone.json()["error"]["message"]
    assert _untokenised(state()) == counted + 1


def _untokenised(state: dict[str, Any]) -> int:
    return sum(sum(one["untokenised"].values()) for one in state["ingresses"])


def test_answer_that_repeats_the_prompt_repeats_its_text(http: httpx.Client) -> None:
    completion = http.post(COMPLETIONS, json={"model": MODEL, "prompt": TEXT, "echo": True, "max_tokens": 1})
    assert completion.json()["choices"][0]["text"].startswith(TEXT)
    continued = {"messages": [USER, SAID], "add_generation_prompt": False, "continue_final_message": True}
    chat = http.post(CHAT, json={"model": MODEL, "echo": True, "max_tokens": 1, **continued})
    assert chat.json()["choices"][0]["message"]["content"].startswith(SAID["content"])
    shown = http.post(CHAT, json={"model": MODEL, "messages": [USER], "return_prompt_text": True, "max_tokens": 1})
    assert TEXT in shown.json()["prompt_text"]


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": TEXT})])
def test_stranger_s_field_named_fairway_changes_no_answer(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, **fields}
    plain = http.post(path, json=body)
    notes = (wishes.UNKNOWN_REPLICA, wishes.NO_OBJECT, wishes.NO_OBJECT, wishes.NO_OBJECT)
    for said, note in zip(({"pin": "x"}, "x", [1], 3), notes, strict=True):
        wished = http.post(path, json={**body, "fairway": said})
        assert wished.status_code == 200
        assert wished.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
        assert wished.headers["x-fairway-note"] == note
    assert "x-fairway-note" not in plain.headers
