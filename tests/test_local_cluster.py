"""Cleaning up after a run whose owner was killed, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app import local_cluster


def _run(tmp_path: Path, name: str, owner: int) -> Path:
    run_dir = tmp_path / f"{local_cluster.RUN_PREFIX}{name}"
    (run_dir / "p").mkdir(parents=True)
    (run_dir / local_cluster.OWNER_FILE).write_text(str(owner))
    return run_dir


def _stand_in_for_haproxy(run_dir: Path) -> "subprocess.Popen[bytes]":
    """A process that names the run's configuration file on its command line, as HAProxy does."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(run_dir / "p" / "haproxy.cfg")])


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_killed_run_s_proxy_and_directory_go_and_a_living_run_s_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_pid: int
) -> None:
    monkeypatch.setattr(local_cluster, "RUNS", tmp_path)
    killed, living = _run(tmp_path, "killed", dead_pid), _run(tmp_path, "living", os.getpid())
    orphan, mine = _stand_in_for_haproxy(killed), _stand_in_for_haproxy(living)
    try:
        local_cluster._clean_up_after_killed_runs()
        orphan.wait(timeout=10)
        assert not killed.exists()
        assert living.exists()
        assert mine.poll() is None
    finally:
        for process in (orphan, mine):
            process.kill()
            process.wait()


def test_directory_without_an_owner_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "RUNS", tmp_path)
    strange = tmp_path / f"{local_cluster.RUN_PREFIX}strange"
    strange.mkdir()
    local_cluster._clean_up_after_killed_runs()
    assert strange.exists()
