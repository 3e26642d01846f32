"""The whole served application on a real model: answers, headers, reservations, live weights, bad input."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import httpx
import openai
import pytest

from serve_app.local_cluster import ClusterError, LocalCluster
from tests.served.conftest import State, local_config

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.usefixtures("nothing_left_open")]

MODEL = "smollm2-135m-instruct"
MAX_MODEL_LEN = 8192


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }


def _long(name: str, sentences: int = 30) -> str:
    return f"Document {name}. " + " ".join(f"Clause {n} of {name} sets limit {n * 37 % 101}." for n in range(sentences))


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_every_replica_lives_on_loopback(cluster: LocalCluster) -> None:
    deployments = [d for application in cluster.status().values() for d in application["deployments"].values()]
    addresses = {replica["node_ip"] for deployment in deployments for replica in deployment["replicas"]}
    assert addresses == {"127.0.0.1"}


def test_capital_of_france_is_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=16,
        temperature=0,
    )
    assert "Paris" in (answer.choices[0].message.content or "")


def test_models_completions_and_streams_are_vllm_s_own(client: openai.OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    plain = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=4, temperature=0)
    streamed = client.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == plain.choices[0].text


def test_answer_names_its_replica_and_prediction(http: httpx.Client, state: State) -> None:
    answer = http.post("/v1/chat/completions", json=_chat("Say yes."))
    assert answer.headers["x-fairway-replica"] in [replica["replica_id"] for replica in state()["replicas"]]
    assert float(answer.headers["x-fairway-predicted-ms"]) > 0
    assert int(answer.headers["x-fairway-hit-tokens"]) >= 0


def test_repeated_prefix_returns_to_its_replica_and_is_found_cached(http: httpx.Client) -> None:
    document = _long("repeated")
    first = http.post("/v1/chat/completions", json=_chat(f"{document}\n\nWhat is limit 3?"))
    time.sleep(1.0)  # the block-stored event reaches the ingress
    second = http.post("/v1/chat/completions", json=_chat(f"{document}\n\nAnd limit 9?"))
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second.headers["x-fairway-replica"] == first.headers["x-fairway-replica"]
    assert cached > 200
    assert int(second.headers["x-fairway-hit-tokens"]) == cached


def test_burst_uses_both_replicas(http: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: http.post("/v1/chat/completions", json=_chat(_long(f"burst {n}"))), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-fairway-replica"] for answer in answers}) == 2


@pytest.mark.parametrize("after_chunks", [0, 1])
def test_ten_aborted_streams_leave_no_reservation(cluster: LocalCluster, after_chunks: int) -> None:
    def abort(number: int) -> None:
        body = _chat(_long(f"abort {after_chunks} {number}"), max_tokens=400, stream=True)
        with (
            httpx.Client(base_url=cluster.url, timeout=60) as own,
            own.stream("POST", "/v1/chat/completions", json=body) as stream,
        ):
            chunks = stream.iter_raw()
            for _ in range(after_chunks):
                next(chunks)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(abort, range(10)))


def test_connection_cut_before_any_answer_leaves_no_reservation(cluster: LocalCluster) -> None:
    body = _chat(_long("cut", 200), max_tokens=4)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=0.05))


def test_batch_of_four_prompts_is_one_reservation(http: httpx.Client, state: State) -> None:
    before = _decided(state())
    body = {"model": MODEL, "prompt": [_long(f"batch {n}", 5) for n in range(4)], "max_tokens": 3, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]
    assert _decided(state()) == before + 1


def _decided(state: dict[str, Any]) -> int:
    return sum(int(one["totals"]["decisions"]) for one in state["ingresses"])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{not json", 400),
        (b"", 400),
        (b"[1, 2]", 400),
        (b'{"model": "%b"}' % MODEL.encode(), 400),
        (b'{"model": "%b", "messages": []}' % MODEL.encode(), 400),
        (b'{"model": "%b", "messages": "hello"}' % MODEL.encode(), 400),
        (b'{"model": "%b", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}' % MODEL.encode(), 400),
        (b'{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}', 404),
    ],
)
def test_bad_request_gets_vllm_s_own_answer(http: httpx.Client, body: bytes, status: int) -> None:
    answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_over_long_prompt_is_400_with_both_lengths(http: httpx.Client, path: str) -> None:
    text = "word " * (MAX_MODEL_LEN + 500)
    body = _chat(text) if "chat" in path else {"model": MODEL, "prompt": text, "max_tokens": 4}
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    lengths = [int(number) for number in re.findall(r"\d{4,}", message)]
    assert MAX_MODEL_LEN in lengths, message
    assert any(length > MAX_MODEL_LEN for length in lengths), message


def test_client_can_not_send_the_ingress_own_headers(http: httpx.Client, state: State) -> None:
    forged = {"x-serve-router-fairway-id": "forged", "x-serve-router-fairway-predicted-ms": "666"}
    answer = http.post("/v1/chat/completions", json=_chat("Say no."), headers=forged)
    assert answer.headers["x-fairway-predicted-ms"] != "666"
    assert "forged" not in [decision["request_id"] for decision in state()["decisions"]]


def test_client_can_not_pair_its_text_with_other_tokens(http: httpx.Client) -> None:
    honest = http.post("/v1/chat/completions", json=_chat("What is the capital of France?", max_tokens=12)).json()
    injected = http.post(
        "/v1/chat/completions",
        json=_chat("What is the capital of France?", max_tokens=12, kv_transfer_params={"prompt_token_ids": [5] * 9}),
    ).json()
    assert injected["choices"][0]["message"]["content"] == honest["choices"][0]["message"]["content"]
    assert injected["usage"]["prompt_tokens"] == honest["usage"]["prompt_tokens"]


def test_unknown_body_field_is_ignored(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json=_chat("Hi.", fairway={"pin": "x"})).status_code == 200


def test_decisions_explain_every_candidate_and_learn_what_was_observed(http: httpx.Client, state: State) -> None:
    http.post("/v1/chat/completions", json=_chat("Explain."))
    deadline_s = time.monotonic() + 10
    while (newest := state()["decisions"][0])["observed"]["ttft_s"] is None and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert newest["observed"]["ttft_s"] > 0
    assert newest["observed"]["status"] == 200
    assert len(newest["candidates"]) == 2
    for candidate in newest["candidates"]:
        assert {"miss_s", "hit_s", "queue_s", "affinity_s", "residual_s", "total_s"} <= candidate.keys()


def test_weights_need_the_token_the_version_and_the_bounds(cluster: LocalCluster, http: httpx.Client) -> None:
    mine = {"Authorization": f"Bearer {cluster.token}"}
    document = http.get("/fairway/weights").json()
    assert http.put("/fairway/weights", json=document).status_code == 401
    assert http.put("/fairway/weights", json=document, headers={"Authorization": "Bearer wrong"}).status_code == 401
    stale = {**document, "version": document["version"] + 7}
    assert http.put("/fairway/weights", json=stale, headers=mine).status_code == 409
    flooded = {**document, "weights": {**document["weights"], "queue": 0}}
    refused = http.put("/fairway/weights", json=flooded, headers=mine)
    assert refused.status_code == 422
    assert "queue" in refused.text
    assert "greater than 0" in refused.text


def _wait_for_more(answers: list[int], count: int, timeout_s: float = 60.0) -> None:
    """Until so many more have come, however slow the machine."""
    enough, deadline_s = len(answers) + count, time.monotonic() + timeout_s
    while len(answers) < enough:
        assert time.monotonic() < deadline_s, f"{len(answers)} of {enough} answers in {timeout_s:g} s"
        time.sleep(0.05)


def test_router_switch_reaches_every_ingress_under_load_without_a_failed_request(
    cluster: LocalCluster, http: httpx.Client, state: State
) -> None:
    mine = {"Authorization": f"Bearer {cluster.token}"}
    statuses: list[int] = []
    stop = threading.Event()

    def load() -> None:
        with httpx.Client(base_url=cluster.url, timeout=60) as own:
            while not stop.is_set():
                statuses.append(own.post("/v1/chat/completions", json=_chat("Count.", max_tokens=2)).status_code)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for router in ("round-robin", "power-of-two", "lbgr"):
            document = http.get("/fairway/weights").json()
            saved = http.put("/fairway/weights", json={**document, "router": router}, headers=mine)
            assert saved.status_code == 200, saved.text
            assert [(one["router"], one["version"]) for one in state()["ingresses"]] == [
                (router, document["version"] + 1)
            ] * 2
            _wait_for_more(statuses, 2)  # the rule in force then routes at least one of them, start to end
    finally:
        stop.set()
        thread.join()
    assert set(statuses) == {200}


def test_page_is_served(http: httpx.Client) -> None:
    page = http.get("/fairway/")
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]


@pytest.mark.parametrize(
    ("application", "path", "value", "says"),
    [
        (1, ["serving_ap"], "x", r"fairway-control.*serving_ap.*Extra inputs"),
        (0, ["engine", "policy"], {"fast_weight": 0.5}, r"fairway.*fast_weight.*greater than or equal to 1.*0\.5"),
    ],
)
def test_bad_setting_stops_the_deployment_with_field_value_and_bound(
    cluster: LocalCluster, application: int, path: list[str], value: object, says: str
) -> None:
    config = local_config(cluster)
    settings = config["applications"][application]["args"]
    for name in path[:-1]:
        settings = settings[name]
    settings[path[-1]] = value
    with pytest.raises(ClusterError, match=f"(?s){says}"):
        cluster.deploy(config, timeout_s=120)
    cluster.deploy(local_config(cluster), timeout_s=120)


def test_replica_that_can_not_start_says_why_in_one_line_of_the_status(cluster: LocalCluster) -> None:
    config = local_config(cluster)
    broken = deepcopy(config["applications"][0])
    broken.update(name="broken", route_prefix="/broken")
    broken["args"]["engine"]["vllm"]["max_model_len"] = 100_000
    broken["args"]["replicas"] = {"count": 1}
    cluster.deploy_without_waiting({**config, "applications": [*config["applications"], broken]})
    deadline_s = time.monotonic() + 240
    while not (said := _start_errors(cluster, "broken")) and time.monotonic() < deadline_s:
        time.sleep(1.0)
    cluster.deploy(config, timeout_s=120)
    assert said
    for message in said:
        (why,) = [line for line in message.splitlines() if "ReplicaStartError" in line]
        assert "max_model_len (100000)" in why
        assert len(message.splitlines()) < 8, message


def _start_errors(cluster: LocalCluster, app: str) -> list[str]:
    """The status messages of the application's deployments that could not start."""
    deployments = cluster.status().get(app, {}).get("deployments", {})
    return [d["message"] for d in deployments.values() if "ReplicaStartError" in d["message"]]
