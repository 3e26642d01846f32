"""One real local cluster for all tests of the served application: two CPU replicas of the real model."""

import os
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.config import ModelSettings
from serve_app.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]


def model_dir() -> Path:
    """The prepared model, or a skip with the command that makes it."""
    path = Path(os.environ.get("FAIRWAY_TEST_MODEL", ModelSettings().source)).expanduser()
    if not (path / "config.json").is_file():
        pytest.skip(f"no model in {path}; run `fairway-serve prepare-model`")
    return path


def local_config(cluster: LocalCluster) -> dict[str, Any]:
    """configs/local.yaml as an operator would deploy it, with this run's token and directories, and wishes allowed."""
    config: dict[str, Any] = deepcopy(yaml.safe_load((ROOT / "configs" / "local.yaml").read_text()))
    serving, control = config["applications"]
    serving["args"]["model"]["source"] = str(model_dir())
    serving["args"]["ingress"] = {"allow_wishes": True}
    engine = serving["args"]["engine"]
    engine["prefill_profile"] = str(ROOT / engine["prefill_profile"])
    control["args"].update(token=cluster.token, state_dir=str(cluster.run_dir / "control"))
    return config


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    """Deployed and running; stopped when the tests of this folder are done."""
    model_dir()
    with LocalCluster(progress=print) as running:
        running.deploy(local_config(running))
        yield running


@pytest.fixture(scope="package")
def http(cluster: LocalCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        yield client


State = Callable[[], dict[str, Any]]


@pytest.fixture
def state(http: httpx.Client) -> State:
    """GET /fairway/state."""
    return lambda: dict(http.get("/fairway/state").json())


@pytest.fixture
def nothing_left_open(state: State) -> Iterator[None]:
    """After the test, every reservation on every replica, as every ingress sees it, must be released."""
    yield
    deadline_s = time.monotonic() + 40
    while True:
        per_ingress = [replica for one in state()["ingresses"] for replica in one["replicas"]]
        left = [replica for replica in per_ingress if replica["num_open"] or replica["load_s"]]
        if not left:
            return
        if time.monotonic() > deadline_s:
            pytest.fail(f"reservations left: {left}")
        time.sleep(0.3)
