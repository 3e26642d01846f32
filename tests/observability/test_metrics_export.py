"""Ray's real exporter shows our metrics under the names, kinds and labels of the table."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.observability.metrics import METRICS

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "tests.observability.publish_and_scrape")


@pytest.mark.cluster
def test_ray_exports_every_metric_of_the_table() -> None:
    run = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr[-2_000:]
    kinds = dict(re.findall(r"^# TYPE (ray_fairway_\w+) (\w+)$", run.stdout, re.MULTILINE))
    assert kinds == {f"ray_{one.name}": one.kind for one in METRICS}
    samples = re.findall(r'^ray_fairway_decisions_total\{.*router="([\w-]+)".*\} ([\d.]+)$', run.stdout, re.MULTILINE)
    assert re.search(r'^ray_fairway_emulated\{.*replica="a".*\} 1.0$', run.stdout, re.MULTILINE)
    of_engine = r'^ray_fairway_engine_left_to_vllm_requests_total\{.*replica="a".*\} 6.0$'
    assert re.search(of_engine, run.stdout, re.MULTILINE)
    assert {router: float(value) for router, value in samples} == {"lbgr": 6.0, "round-robin": 2.0}
