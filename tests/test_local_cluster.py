"""Cleaning up after a run whose owner was killed, and nothing else."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from serve_app import local_cluster


def _run(tmp_path: Path, name: str, owner: int) -> Path:
    run_dir = tmp_path / f"{local_cluster.RUN_PREFIX}{name}"
    (run_dir / "p").mkdir(parents=True)
    (run_dir / local_cluster.HOLDER_FILE).write_text(str(owner))
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


def test_directory_without_a_holder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "RUNS", tmp_path)
    strange = tmp_path / f"{local_cluster.RUN_PREFIX}strange"
    strange.mkdir()
    local_cluster._clean_up_after_killed_runs()
    assert strange.exists()


OWNER = """
import signal, time
# A shell starts background jobs with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from serve_app.local_cluster import LocalCluster
with LocalCluster(num_cpus=1) as cluster:
    print(cluster.run_dir, flush=True)
    time.sleep(300)
"""


def _processes_of(run_dir: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if str(run_dir).encode() in command:
                found.append(command.decode(errors="replace").replace("\0", " "))
    return found


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_the_owner_was_interrupted_or_killed(number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    try:
        run_dir = Path(owner.stdout.readline().strip())
        assert _processes_of(run_dir)
        owner.send_signal(number)
        owner.wait(timeout=120)
        deadline_s = time.monotonic() + 120
        while (run_dir.exists() or _processes_of(run_dir)) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        assert not run_dir.exists()
        assert _processes_of(run_dir) == []
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
