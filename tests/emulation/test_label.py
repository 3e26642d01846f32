"""The label on model cards and responses, without a server and in vLLM's own application."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.emulation.label import EmulatedLabel, labelled_cards

CARDS = b'{"object":"list","data":[{"id":"a","object":"model"},{"id":"b","object":"model","parent":"a"}]}'


async def _receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _answering(*bodies: bytes, status: int = 200) -> ASGIApp:
    """An application that sends the bodies as chunks of one answer, with the length of them all."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        length = str(sum(map(len, bodies))).encode()
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", length)]})
        for index, body in enumerate(bodies):
            await send({"type": "http.response.body", "body": body, "more_body": index + 1 < len(bodies)})

    return app


async def _ask(app: ASGIApp, path: str, method: str = "GET") -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await EmulatedLabel(app)({"type": "http", "method": method, "path": path, "headers": []}, _receive, send)
    return sent


@pytest.mark.parametrize("path", ["/v1/models", "/stock/v1/models"])
async def test_every_card_of_the_list_is_labelled_and_the_length_is_right(path: str) -> None:
    start, body = await _ask(_answering(CARDS[:30], CARDS[30:]), path)
    answer = json.loads(body["body"])
    assert [card.pop("emulated") for card in answer["data"]] == [True, True]
    assert answer == json.loads(CARDS)
    assert dict(start["headers"]) == {
        b"content-length": str(len(body["body"])).encode(),
        b"x-fairway-emulated": b"true",
    }


async def test_single_card_is_labelled() -> None:
    _, body = await _ask(_answering(b'{"id":"org/a","object":"model"}'), "/v1/models/org/a")
    assert json.loads(body["body"]) == {"id": "org/a", "object": "model", "emulated": True}


async def test_stream_passes_chunk_by_chunk_with_the_header() -> None:
    start, *chunks = await _ask(_answering(b"data: 1", b"data: 2", CARDS), "/v1/completions", "POST")
    assert start["headers"][-1] == (b"x-fairway-emulated", b"true")
    assert [chunk["body"] for chunk in chunks] == [b"data: 1", b"data: 2", CARDS]


@pytest.mark.parametrize(
    "body", [b"", b"no JSON", b"[1]", b'{"detail":"Unknown model"}', b'{"object":"list","data":null}']
)
async def test_answer_without_cards_keeps_its_bytes(body: bytes) -> None:
    assert labelled_cards(body) == body
    start, sent = await _ask(_answering(body, status=404), "/v1/models/none")
    assert (start["status"], sent["body"]) == (404, body)


async def test_what_is_no_http_passes_untouched() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(send)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    await EmulatedLabel(app)({"type": "lifespan"}, _receive, send)
    assert seen == [send]


async def test_vllm_takes_the_label_by_its_middleware_argument() -> None:
    from types import SimpleNamespace

    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    args = FrontendArgs(middleware=["serve_app.emulation.label.EmulatedLabel"])
    args.api_key = None
    app: FastAPI = build_app(args, ("generate",))
    engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64), renderer=None, input_processor=None)
    app.state.openai_serving_models = OpenAIServingModels(engine, [BaseModelPath("tiny", "/tiny")])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        answer = await client.get("/v1/models")
    (card,) = answer.json()["data"]
    assert (card["id"], card["emulated"]) == ("tiny", True)
    assert answer.headers["x-fairway-emulated"] == "true"
