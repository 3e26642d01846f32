"""Every endpoint of the engine is routed, counted once and released, whatever it does and however it ends."""

import time
from typing import Any

import httpx
import pytest

from tests.served.conftest import State

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.usefixtures("nothing_left_open")]

MODEL = "smollm2-135m-instruct"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAY = [{"role": "user", "content": "Say yes."}]

REQUESTS: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"messages": SAY}, 200),
    (CHAT, {"messages": SAY, "stream": True}, 200),
    (CHAT, {"messages": SAY, "n": 2, "temperature": 1.0}, 200),
    (CHAT, {"messages": SAY, "max_tokens": 100_000}, 400),
    (CHAT, {"messages": SAY, "temperature": -3}, 400),
    (CHAT, {"messages": SAY, "model": "nobody"}, 404),
    ("/v1/chat/completions/batch", {"messages": [SAY, SAY]}, 200),
    ("/v1/chat/completions/batch", {"messages": []}, 400),
    (COMPLETIONS, {"prompt": "One, two,"}, 200),
    (COMPLETIONS, {"prompt": "One, two,", "stream": True}, 200),
    (COMPLETIONS, {"prompt": ["One,", "Two,", "Three,"]}, 200),
    (COMPLETIONS, {"prompt": ["One,", "Two,"], "stream": True}, 200),
    (COMPLETIONS, {"prompt": [5, 6, 7]}, 200),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, 400),
    ("/v1/responses", {"input": "Say yes.", "max_output_tokens": 3}, 200),
    ("/v1/messages", {"messages": SAY, "system": "Be brief."}, 200),
    ("/v1/messages", {"messages": SAY, "stream": True}, 200),
    ("/tokenize", {"messages": SAY}, 200),
    ("/tokenize", {"prompt": "One, two,"}, 200),
    ("/detokenize", {"tokens": [5, 6, 7]}, 200),
    ("/v1/embeddings", {"input": "One, two,"}, 404),
]


@pytest.mark.parametrize(("path", "fields", "status"), REQUESTS)
def test_endpoint_is_decided_once_and_its_end_is_reported(
    http: httpx.Client, state: State, path: str, fields: dict[str, Any], status: int
) -> None:
    before = _decided(state())
    answer = http.post(path, json={"model": MODEL, "max_tokens": 3, **fields})
    assert answer.status_code == status, answer.text
    assert _decided(state()) == before + 1
    assert _reported_status(http, answer.headers["x-fairway-request-id"]) == status


def _decided(state: dict[str, Any]) -> int:
    return sum(int(one["totals"]["decisions"]) for one in state["ingresses"])


def _reported_status(http: httpx.Client, request_id: str) -> int:
    """The status that the replica reported at the request's end; a request closes once it is there."""
    deadline_s = time.monotonic() + 20
    while (told := http.get(f"/fairway/decisions/{request_id}").json()["observed"]["status"]) is None:
        assert time.monotonic() < deadline_s, f"{request_id} was not reported in 20 s"
        time.sleep(0.1)
    return int(told)
