"""README's examples of calling the API, run as they stand there (only the port differs)."""

import re
import subprocess
import sys

import pytest

from serve_app.local_cluster import LocalCluster
from tests.served.conftest import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.usefixtures("nothing_left_open")]

WRITTEN_URL = "http://127.0.0.1:8000"


def _example(language: str, url: str) -> str:
    """The block of `language` under "Call it", addressed to `url`."""
    section = (ROOT / "README.md").read_text().split("## Call it")[1].split("\n## ")[0]
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert WRITTEN_URL in block
    return str(block.replace(WRITTEN_URL, url))


def _output(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_curl_example_names_paris(cluster: LocalCluster) -> None:
    assert "Paris" in _output(["bash", "-c", _example("bash", cluster.url)])


def test_openai_client_example_names_paris_its_replica_and_the_prediction(cluster: LocalCluster) -> None:
    answer, decision = _output([sys.executable, "-c", _example("python", cluster.url)]).splitlines()
    assert "Paris" in answer
    replica, predicted_ms = decision.split()
    assert replica
    assert float(predicted_ms) > 0
