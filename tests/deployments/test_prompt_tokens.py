"""Prompt tokens made in the ingress, against Hugging Face's own tokeniser; `tests/served` compares with an engine."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from serve_app.config import FairwayServeConfig, IngressSettings
from serve_app.deployments.engine_config import llm_config
from serve_app.deployments.prompt_tokens import PromptTokeniser, ReadBody
from serve_app.router.block_hashes import BlockHasher
from serve_app.router.ray_internals import TokenSender, encode_prompt_token_ids
from tests.emulation.conftest import TINY_LLAMA

MODEL = "tiny"
BLOCK = 16
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters | tojson }})"
    "{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}call {{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if style %}{{ style }}:{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "Which limit does clause 7 set?"}
SYSTEM = {"role": "system", "content": "Answer in one word."}
SAID = {"role": "assistant", "content": "Clause 7 sets"}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": '{"n": 7}'}}
CALLED = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call-1", "content": "9"}]


def _write_model(directory: Path) -> Path:
    """A tiny model's configuration and a byte-level tokeniser whose chat template shows everything it is given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokeniser = Tokenizer(models.BPE())
    tokeniser.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokeniser.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokeniser.train_from_iterator([json.dumps([USER, SYSTEM, SAID, TOOL])] * 20, trainer)
    tokeniser.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokeniser, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    config = {**TINY_LLAMA, "max_position_embeddings": 2_000_000, "bos_token_id": 0, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_model(tmp_path_factory.mktemp("tiny"))


def _config(model: Path) -> Any:
    engine = {"vllm": {"enforce_eager": True, "max_model_len": 1_000_000, "dtype": "float32"}}
    return llm_config(
        FairwayServeConfig.model_validate({"model": {"id": MODEL, "source": str(model)}, "engine": engine})
    )


@pytest.fixture(scope="module")
def tokeniser(model: Path) -> Iterator[PromptTokeniser]:
    # However slow the machine; the limit itself has a test of its own.
    settings = IngressSettings().model_copy(update={"tokenise_timeout_s": 120.0})
    made = PromptTokeniser(_config(model), MODEL, settings)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


async def _read(tokeniser: PromptTokeniser, body: dict[str, Any], block_size: int | None = BLOCK) -> ReadBody:
    return await tokeniser.read(json.dumps({"model": MODEL, **body}).encode(), block_size)


def _templated(reference: Any, messages: list[Any], **kwargs: Any) -> list[int]:
    options = {"add_generation_prompt": True, "tokenize": False, **kwargs}
    # vLLM gives the template a call's arguments as an object, as templates expect them.
    read: list[Any] = json.loads(json.dumps(messages))
    for message in read:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = reference.apply_chat_template(read, **options)
    ids: list[int] = reference(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"messages": [USER]}, {}),
        ({"messages": [SYSTEM, USER]}, {}),
        ({"messages": [SYSTEM, USER, SAID, USER], "max_tokens": 5}, {}),
        ({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}),
        ({"messages": CALLED}, {}),
        ({"messages": [USER], "add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"messages": [USER], "chat_template_kwargs": {"style": "terse"}}, {"style": "terse"}),
        (
            {"messages": [USER, SAID], "add_generation_prompt": False, "continue_final_message": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ],
)
async def test_chat_is_templated_and_tokenised_as_hugging_face_does(
    tokeniser: PromptTokeniser, reference: Any, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    ids = _templated(reference, fields["messages"], **options)
    tokens = (await _read(tokeniser, fields)).tokens
    assert tokens is not None
    assert (tokens.num_prompts, tokens.num_tokens) == (1, len(ids))
    assert tokens.payload == encode_prompt_token_ids(ids)
    assert tokens.hashes == BlockHasher(BLOCK).hashes(ids)


async def test_text_parts_and_special_tokens_change_chat_as_they_do_in_vllm(
    tokeniser: PromptTokeniser, reference: Any
) -> None:
    text = USER["content"]
    parts = {"role": "user", "content": [{"type": "text", "text": part} for part in (text, "Be sure.")]}
    joined = _templated(reference, [{"role": "user", "content": f"{text}\nBe sure."}])
    tokens = (await _read(tokeniser, {"messages": [parts], "add_special_tokens": True})).tokens
    assert tokens is not None
    assert tokens.payload == encode_prompt_token_ids([0, *joined])


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, slice(None)),
        ({"add_special_tokens": False}, slice(1, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, slice(0, 4)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
    ],
)
async def test_completion_is_tokenised_and_cut_as_asked(
    tokeniser: PromptTokeniser, reference: Any, fields: dict[str, Any], kept: slice
) -> None:
    ids = reference("Clause 7 sets the limit")["input_ids"][kept]
    tokens = (await _read(tokeniser, {"prompt": "Clause 7 sets the limit", **fields})).tokens
    assert tokens is not None
    assert tokens.payload == encode_prompt_token_ids(ids)
    assert tokens.num_tokens == len(ids)


async def test_batch_counts_all_its_prompts_and_hashes_the_first(tokeniser: PromptTokeniser, reference: Any) -> None:
    texts = ["a much longer first prompt " * 8, "short", "mid size"]
    ids = [reference(text)["input_ids"] for text in texts]
    for prompt in (texts, ids):
        tokens = (await _read(tokeniser, {"prompt": prompt})).tokens
        assert tokens is not None
        assert (tokens.num_prompts, tokens.num_tokens) == (3, sum(map(len, ids)))
        assert tokens.hashes == BlockHasher(BLOCK).hashes(ids[0])
        assert tokens.payload is None


async def test_batch_of_chats_counts_each(tokeniser: PromptTokeniser, reference: Any) -> None:
    chats = [[SYSTEM, USER], [USER]]
    ids = [_templated(reference, chat) for chat in chats]
    tokens = (await _read(tokeniser, {"messages": chats})).tokens
    assert tokens is not None
    assert (tokens.num_prompts, tokens.num_tokens) == (2, sum(map(len, ids)))
    assert tokens.hashes == BlockHasher(BLOCK).hashes(ids[0])


async def test_ids_of_the_client_are_counted_as_they_are(tokeniser: PromptTokeniser) -> None:
    ids = list(range(5, 45))
    tokens = (await _read(tokeniser, {"prompt": ids})).tokens
    assert tokens is not None
    assert (tokens.num_tokens, tokens.hashes, tokens.payload) == (40, BlockHasher(BLOCK).hashes(ids), None)


async def test_salt_and_adapter_separate_blocks_as_the_engine_separates_them(tokeniser: PromptTokeniser) -> None:
    ids = list(range(5, 45))
    salted = (await _read(tokeniser, {"prompt": ids, "cache_salt": "s"})).tokens
    adapted = (await _read(tokeniser, {"prompt": ids, "model": "adapter"})).tokens
    assert salted is not None
    assert adapted is not None
    assert salted.hashes == BlockHasher(BLOCK).hashes(ids, "s")
    assert adapted.hashes == BlockHasher(BLOCK).hashes(ids, None, "adapter")


async def test_nothing_is_hashed_while_the_block_size_is_unknown(tokeniser: PromptTokeniser) -> None:
    tokens = (await _read(tokeniser, {"prompt": "x" * 200}, block_size=None)).tokens
    assert tokens is not None
    assert tokens.num_tokens > 0
    assert tokens.hashes == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": []}, "refused by vLLM"),
        ({"messages": "hello"}, "refused by vLLM"),
        ({"messages": [{"content": "no role"}]}, "refused by vLLM"),
        ({"messages": [USER], "tools": [1]}, "refused by vLLM"),
        ({"messages": [USER], "tools": [TOOL]}, "refused by vLLM"),
        ({"messages": [USER], "max_tokens": 2_000_000}, "refused by vLLM"),
        ({"messages": [USER], "chat_template": "{{ 1 }}"}, "refused by vLLM"),
        ({"prompt": ""}, "refused by vLLM"),
        ({"prompt": []}, "refused by vLLM"),
        ({"prompt": [[]]}, "refused by vLLM"),
        ({"prompt": [-1]}, "refused by vLLM"),
        ({"prompt": {"a": 1}}, "refused by vLLM"),
        ({"prompt": "x", "suffix": "y"}, "refused by vLLM"),
        ({"prompt": "x", "truncate_prompt_tokens": -2}, "refused by vLLM"),
        ({"prompt": "x" * 5_000_000}, "body too long"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content other than text"),
        ({"input": "x"}, "no messages or prompt"),
    ],
)
async def test_what_vllm_would_refuse_is_routed_without_tokens(
    tokeniser: PromptTokeniser, body: dict[str, Any], reason: str
) -> None:
    read = await _read(tokeniser, body)
    assert (read.tokens, read.untokenised) == (None, reason)


async def test_body_that_is_cut_short_or_no_json_has_no_tokens(tokeniser: PromptTokeniser) -> None:
    whole = json.dumps({"prompt": "x"}).encode()
    assert (await tokeniser.read(whole, BLOCK, truncated=True)).untokenised == "body cut short"
    assert (await tokeniser.read(whole[:-1], BLOCK)).untokenised == "no JSON object"
    assert (await tokeniser.read(b"", BLOCK)).untokenised == "no JSON object"


async def test_client_s_own_ids_beside_the_text_are_dropped(tokeniser: PromptTokeniser) -> None:
    forged = {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [5] * 90}}
    honest = await _read(tokeniser, {"messages": [USER]})
    assert (await _read(tokeniser, forged)) == honest


async def _gaps_s(stop: asyncio.Event) -> list[float]:
    """How long the loop left a task of 1 ms waiting, each time."""
    gaps = []
    while not stop.is_set():
        before_s = time.perf_counter()
        await asyncio.sleep(0.001)
        gaps.append(time.perf_counter() - before_s)
    return gaps


@pytest.mark.parametrize("shape", ["chat", "completion"])
async def test_prompt_of_a_megabyte_stalls_neither_the_loop_nor_a_short_prompt(
    tokeniser: PromptTokeniser, shape: str
) -> None:
    text = "".join(f"Clause {n} sets limit {n * 37 % 101}; " for n in range(45_000))[:1_000_000]
    long = {"messages": [{"role": "user", "content": text}]} if shape == "chat" else {"prompt": text}
    raw = json.dumps(long).encode()
    stop = asyncio.Event()
    watch = asyncio.create_task(_gaps_s(stop))
    began_s = time.perf_counter()
    slow = asyncio.create_task(tokeniser.read(raw, BLOCK))
    overtaking = 0
    while not slow.done():
        assert (await _read(tokeniser, {"messages": [USER]})).tokens is not None
        overtaking += not slow.done()
        await asyncio.wait([slow], timeout=0.02)  # other requests come one by one, not as a flood
    took_s = time.perf_counter() - began_s
    stop.set()
    tokens = slow.result().tokens
    assert tokens is not None
    assert tokens.num_tokens > 200_000
    assert overtaking >= 3
    assert max(await watch) < took_s / 3


async def test_prompt_that_takes_too_long_is_given_up_in_time(model: Path) -> None:
    tokeniser = PromptTokeniser(_config(model), MODEL, IngressSettings(tokenise_timeout_s=0.02))
    try:
        raw = json.dumps({"prompt": "Clause 7 sets the limit. " * 40_000}).encode()
        read = await tokeniser.read(raw, BLOCK)
        assert (read.tokens, read.untokenised) == (None, "not in time")
    finally:
        tokeniser.close()


def test_channel_takes_the_encoded_ids() -> None:
    assert TokenSender().push("tcp://127.0.0.1:1", "key", encode_prompt_token_ids([1, 2])) is False
