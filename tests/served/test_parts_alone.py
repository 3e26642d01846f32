"""One part at a time in somebody else's Ray Serve LLM application: README's snippets, as they stand there.

The engines are emulated (`serve_app.emulation`); application, ingress and server classes are Ray's own.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.local_cluster import LocalCluster
from serve_app.local_ray import LOOPBACK
from serve_app.router.ray_internals import free_ports
from tests.served.conftest import ROOT, local_config, model_dir

pytestmark = [pytest.mark.cluster, pytest.mark.model]

MODEL = "emulated"


def _snippets() -> dict[str, Any]:
    """README's YAML blocks under "Take one part alone", merged."""
    section = (ROOT / "README.md").read_text().split("## Take one part alone")[1].split("\n## ")[0]
    merged: dict[str, Any] = {}
    for block in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL):
        merged |= yaml.safe_load(block)
    return merged


def _stock_application(model: Path) -> dict[str, Any]:
    snippets = _snippets()
    engine = {
        **snippets["engine_kwargs"],
        "worker_cls": "serve_app.emulation.worker.EmulatedGpuWorker",
        "load_format": "dummy",
        "middleware": ["serve_app.emulation.label.EmulatedLabel"],
        "enforce_eager": True,
        "block_size": 16,
        "max_model_len": 4096,
        "enable_prompt_tokens_details": True,
    }
    engine["additional_config"] = {**engine["additional_config"], "emulation": {"step_base_s": 0.01}}
    events_port, token_port = free_ports(2, LOOPBACK)
    llm = {
        "model_loading_config": {"model_id": MODEL, "model_source": str(model)},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": engine,
        "deployment_config": {**snippets["deployment_config"], "num_replicas": 2},
        "experimental_configs": {"KV_EVENTS_PORT_BASE": events_port, "KV_TOKEN_PORT_BASE": token_port},
    }
    return {
        "name": "stock",
        "route_prefix": "/stock",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [llm]},
    }


@pytest.fixture(scope="module")
def stock(cluster: LocalCluster) -> Iterator[httpx.Client]:
    """Ray's own application beside ours, with our scheduler and our router; ours alone again afterwards."""
    config = local_config(cluster)
    cluster.deploy({**config, "applications": [*config["applications"], _stock_application(model_dir())]})
    with httpx.Client(base_url=f"{cluster.url}/stock", timeout=60) as client:
        yield client
    cluster.deploy(config)


def _ask(client: httpx.Client, text: str) -> int:
    """Send a completion; returns the tokens that the engine found cached."""
    answer = client.post("/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)


def _document(name: str) -> str:
    return " ".join(f"Clause {n} of {name} sets limit {n * 37 % 101}." for n in range(40))


def _all_return(client: httpx.Client, name: str, times: int) -> bool:
    """Whether a new document, once read, is found cached by every one of `times` later requests."""
    _ask(client, f"{_document(name)} First question?")
    time.sleep(1.0)  # its block-stored events reach the router
    return all(_ask(client, f"{_document(name)} Question {number}?") > 300 for number in range(times))


def test_router_and_scheduler_alone_send_a_prefix_back_to_its_replica(stock: httpx.Client) -> None:
    deadline_s = time.monotonic() + 30
    attempt = 0
    while not _all_return(stock, f"warm-up {attempt}", 2) and time.monotonic() < deadline_s:
        attempt += 1  # Serve has not yet told the router where the replicas publish their events
    # At random, ten requests would all return to one of two replicas once in a thousand runs.
    assert _all_return(stock, "the document", 10)


def test_emulated_model_and_its_answers_are_labelled(stock: httpx.Client) -> None:
    answer = stock.get("/v1/models")
    assert [(card["id"], card["emulated"]) for card in answer.json()["data"]] == [(MODEL, True)]
    assert answer.headers["x-fairway-emulated"] == "true"
    assert stock.get(f"/v1/models/{MODEL}").json()["emulated"] is True
