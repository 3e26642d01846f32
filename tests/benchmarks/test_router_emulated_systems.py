"""The systems of the emulated comparison: how they are started, found and ended, without starting an engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from router_emulated_app import app_config, replica_urls
from router_emulated_cells import ROUTERS, Scale
from router_emulated_sglang import BENCHMARKS, engine_command, router_command
from router_emulated_systems import SystemFailed, empty_cache, end_group, poll, running

from serve_app.config import ControlConfig, EnginePolicy, FairwayServeConfig
from serve_app.deployments.engine_config import SCHEDULER
from serve_app.emulation.settings import EmulationSettings

HAPROXY = """backend http-fairway-control
    server SERVE_REPLICA_fairway-control-FairwayControl-1 127.0.0.1:48000 check
backend http-fairway
    default-server fastinter 250ms check
    # Servers in this backend
    server SERVE_REPLICA_fairway-FairwayServer-a 127.0.0.1:48003 check observe layer4
    server SERVE_REPLICA_fairway-FairwayServer-b 127.0.0.1:48004 check observe layer4
    server SERVE_PROXY_ACTOR-fallback-1 127.0.0.1:42243 check backup
    use-server SERVE_REPLICA_fairway-FairwayServer-a if { var(target) -m str "a" }
backend http-fairway-pinned
    server SERVE_REPLICA_fairway-FairwayServer-a 127.0.0.1:48003 track http-fairway/a
"""


def test_replicas_are_found_once_in_the_applications_own_backend() -> None:
    assert replica_urls(HAPROXY, "fairway") == ["http://127.0.0.1:48003", "http://127.0.0.1:48004"]
    assert replica_urls(HAPROXY, "other") == []


def test_app_is_configured_with_four_slowed_engines_and_our_defaults_inside(tmp_path: Path) -> None:
    config = app_config(Scale(time_scale=3.0), tmp_path, "a" * 16, tmp_path)

    serving, control = config["applications"]
    settings = FairwayServeConfig.model_validate(serving["args"])
    assert ControlConfig.model_validate(control["args"]).token == "a" * 16
    assert settings.replicas.count == 4
    assert settings.engine.emulation == EmulationSettings(time_scale=3.0)
    assert settings.router.residual_bound_s == 3.0
    table = settings.engine.policy.prefill_profile
    assert table is not None
    assert table.seconds[table.tokens.index(2_048)] == pytest.approx(3 * (0.005 + 2_048e-4))
    assert settings.engine.policy == EnginePolicy(prefill_profile=table)


@pytest.mark.parametrize("ours_inside", [False, True])
def test_plain_server_has_our_scheduler_only_where_asked_for(ours_inside: bool, tmp_path: Path) -> None:
    command = engine_command(Scale(), tmp_path, 8_123, ours_inside=ours_inside)

    sections = json.loads(command[command.index("--additional-config") + 1])
    assert (SCHEDULER in command) == ("fairway" in sections) == ours_inside
    assert sections["emulation"]["time_scale"] == Scale().time_scale
    assert command[command.index("--block-size") + 1] == "16"
    assert command[command.index("--enforce-eager") + 1].startswith("--")


def test_sglang_router_gets_its_options_and_all_engines() -> None:
    command = router_command(Path("python"), 1, 2, ["http://a", "http://b"], ROUTERS["sglang-0.5"].options)

    assert command[command.index("--cache-threshold") + 1] == "0.5"
    assert command[-3:] == ["--worker-urls", "http://a", "http://b"]


def test_process_and_its_children_are_gone_at_the_end(tmp_path: Path) -> None:
    script = "import subprocess, sys; c = subprocess.Popen(['sleep', '600']); print(c.pid, flush=True); c.wait()"
    log = tmp_path / "log"
    with running([sys.executable, "-c", script], log, {}) as process:
        poll(lambda: bool(log.read_text().strip()), 30.0, "the child did not start")
        child = int(log.read_text())
        assert _is_alive(child)

    assert process.returncode is not None
    poll(lambda: not _is_alive(child), 30.0, "the child outlived its group")


def test_process_ends_when_its_benchmark_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.append({str(BENCHMARKS)!r})
from router_emulated_systems import running
with running(["sleep", "600"], Path({str(tmp_path / "log")!r}), {{}}) as process:
    print(process.pid, flush=True)
    process.wait()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        held = int(benchmark.stdout.readline())
        assert _is_alive(held)
        benchmark.kill()

    poll(lambda: not _is_alive(held), 30.0, "the process outlived the benchmark")


def test_process_that_has_ended_by_itself_is_ended_without_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()

    end_group(process)


def test_engine_that_is_not_there_cannot_be_emptied() -> None:
    with pytest.raises(SystemFailed, match=r"http://127\.0\.0\.1:9"):
        empty_cache("http://127.0.0.1:9")


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended stays in the list until its new parent asks for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
