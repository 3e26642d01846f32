"""Wishes on the served application, which allows them here: pins, rules, notes, and the whole explanation."""

import time
from typing import Any

import httpx
import openai
import pytest

from serve_app.local_cluster import LocalCluster
from serve_app.router import wishes
from tests.served.conftest import State

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.usefixtures("nothing_left_open")]

MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"


def _body(said: Any = None, **fields: Any) -> dict[str, Any]:
    wish = {} if said is None else {"fairway": said}
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2, **wish, **fields}


@pytest.fixture
def replica_ids(state: State) -> list[str]:
    return [replica["replica_id"] for replica in state()["replicas"]]


def _explained(http: httpx.Client, answer: httpx.Response) -> dict[str, Any]:
    """The decision, once what was observed has come in."""
    deadline_s = time.monotonic() + 20
    while True:
        told = http.get(f"/fairway/decisions/{answer.headers['x-fairway-request-id']}")
        assert told.status_code == 200, told.text
        explanation: dict[str, Any] = told.json()
        if explanation["observed"]["status"] is not None:
            return explanation
        assert time.monotonic() < deadline_s, explanation
        time.sleep(0.1)


def test_pin_is_followed_by_every_ingress(http: httpx.Client, replica_ids: list[str]) -> None:
    for pin in replica_ids * 3:
        answer = http.post(CHAT, json=_body({"pin": pin}))
        assert answer.headers["x-fairway-replica"] == pin
        assert "x-fairway-note" not in answer.headers


def test_official_client_pins_by_its_extra_body(cluster: LocalCluster, replica_ids: list[str]) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)
    for pin in replica_ids:
        answer = client.completions.with_raw_response.create(
            model=MODEL, prompt="One, two,", max_tokens=2, extra_body={"fairway": {"pin": pin}}
        )
        assert answer.headers["x-fairway-replica"] == pin


@pytest.mark.parametrize(
    ("said", "note"),
    [
        ({"pin": "nobody"}, wishes.UNKNOWN_REPLICA),
        ({"router": "best"}, wishes.BAD_ROUTER),
        ({"pin": 3}, wishes.BAD_PIN),
        ({"priority": 1}, wishes.UNKNOWN_FIELD),
        ("pin", wishes.NO_OBJECT),
    ],
)
def test_wish_that_can_not_be_followed_is_noted_counted_and_answered(
    http: httpx.Client, state: State, said: Any, note: str
) -> None:
    before = _counted(state(), note)
    answer = http.post(CHAT, json=_body(said))
    assert answer.status_code == 200
    assert answer.headers["x-fairway-note"] == note
    assert _counted(state(), note) == before + 1
    assert _explained(http, answer)["wish"]["note"] == note


def _counted(state: dict[str, Any], note: str) -> int:
    return sum(int(one["wishes"].get(note, 0)) for one in state["ingresses"])


def test_named_rule_decides_its_request_alone(http: httpx.Client) -> None:
    ruled = http.post(CHAT, json=_body({"router": "round-robin"}))
    plain = http.post(CHAT, json=_body())
    assert _explained(http, ruled)["router"] == "round-robin"
    assert _explained(http, plain)["router"] == "lbgr"


def test_explanation_tells_terms_version_rule_wish_and_what_was_observed(
    http: httpx.Client, replica_ids: list[str]
) -> None:
    answer = http.post(CHAT, json=_body(max_tokens=3))
    told = _explained(http, answer)
    assert told["replica_id"] == answer.headers["x-fairway-replica"]
    assert sorted(terms["replica_id"] for terms in told["candidates"]) == sorted(replica_ids)
    for terms in told["candidates"]:
        assert {"miss_s", "hit_s", "queue_s", "affinity_s", "residual_s", "total_s", "predicted_s"} <= terms.keys()
    assert (told["router"], told["wish"]) == ("lbgr", None)
    assert told["weights_version"] == http.get("/fairway/weights").json()["version"]
    assert told["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert told["observed"]["ttft_s"] > 0
    assert told["observed"]["status"] == 200


def test_unknown_request_is_404_and_says_which_id_to_give(http: httpx.Client) -> None:
    told = http.get("/fairway/decisions/nobody")
    assert told.status_code == 404
    assert "x-fairway-request-id" in told.json()["detail"]
