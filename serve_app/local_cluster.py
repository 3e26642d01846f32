"""A Ray cluster on this machine alone: loopback, free ports, its own directory, gone when it is stopped.

The demo and the tests use it. Ray runs under a process of its own (`serve_app.local_ray`), and applications are
deployed with the same `serve deploy` that an operator uses.
"""

import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from serve_app.environment import DEFAULT_ENV
from serve_app.local_ray import LOOPBACK, PROXY_DIR, READY, remove_run
from serve_app.router.ray_internals import free_ports

PORTS_A_CLUSTER = 200
RUNS = Path("/tmp")
"""Not TMPDIR: HAProxy's socket must fit into 97 characters, of which Ray's node id takes 56."""
RUN_PREFIX = "fairway-"
HOLDER_FILE = "holder.pid"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
Progress = Callable[[str], None]


class ClusterError(RuntimeError):
    """The cluster or an application did not come up; the message says what Serve said."""


class LocalCluster:
    """Use as a context manager."""

    def __init__(self, num_cpus: int = 8, num_gpus: int = 0, progress: Progress = lambda text: None) -> None:
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._progress = progress
        self.run_dir = Path(tempfile.mkdtemp(prefix=RUN_PREFIX, dir=RUNS))
        self.token = secrets.token_urlsafe(24)
        self.http_port, self.dashboard_port, *proxy_ports = free_ports(5, LOOPBACK)
        self._env = self._environment(*proxy_ports)
        self._holder: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Root of the HTTP API."""
        return f"http://{LOOPBACK}:{self.http_port}"

    def __enter__(self) -> "LocalCluster":
        _clean_up_after_killed_runs()
        self._progress("starting Ray on loopback")
        command = [sys.executable, "-m", "serve_app.local_ray", str(self.run_dir)]
        command += ["--dashboard-port", str(self.dashboard_port)]
        command += ["--num-cpus", str(self._num_cpus), "--num-gpus", str(self._num_gpus)]
        with self._log.open("w") as log:
            # A session of its own: Ctrl-C reaches the owner alone, which then stops in order.
            self._holder = subprocess.Popen(
                command,
                env={**os.environ, **self._env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        (self.run_dir / HOLDER_FILE).write_text(str(self._holder.pid))
        try:
            self._wait_until_ready(self._holder)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def deploy(self, config: dict[str, Any], timeout_s: float = 600.0, progress: Progress | None = None) -> None:
        """`deploy_without_waiting`, then wait until every application runs.

        Raises:
            ClusterError: an application failed or was not running after `timeout_s`.
        """
        self.deploy_without_waiting(config)
        names = {app["name"] for app in config["applications"]}
        self._wait_until_running(names, time.monotonic() + timeout_s, progress or self._progress)

    def deploy_without_waiting(self, config: dict[str, Any]) -> None:
        """`serve deploy` a Serve config, on this cluster's port.

        Raises:
            ClusterError: Serve refused the file.
        """
        path = self.run_dir / "serve.yaml"
        options = {**config.get("http_options", {}), "host": LOOPBACK, "port": self.http_port}
        path.write_text(yaml.safe_dump({**config, "http_options": options}))
        self._serve_deploy(path)

    def status(self) -> dict[str, Any]:
        """Serve's applications by name, over Ray's REST API: the `serve status` command takes seconds to start."""
        answer = httpx.get(
            f"http://{LOOPBACK}:{self.dashboard_port}/api/serve/applications/",
            headers={"Authorization": f"Bearer {self._env['RAY_AUTH_TOKEN']}"},
            timeout=30.0,
        )
        answer.raise_for_status()
        applications: dict[str, Any] = answer.json()["applications"]
        return applications

    def stop(self) -> None:
        """Stop everything that was started here; harmless when repeated."""
        if self._holder is None:
            return
        self._progress("stopping")
        holder, self._holder = self._holder, None
        assert holder.stdin is not None
        assert holder.stdout is not None
        with suppress(OSError):
            holder.stdin.close()
        try:
            holder.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(holder.pid, signal.SIGKILL)
            holder.wait()
        holder.stdout.close()
        remove_run(self.run_dir)

    @property
    def _log(self) -> Path:
        return self.run_dir / "holder.log"

    def _wait_until_ready(self, holder: "subprocess.Popen[str]") -> None:
        assert holder.stdout is not None
        readable, _, _ = select.select([holder.stdout], [], [], START_TIMEOUT_S)
        said = holder.stdout.readline().strip() if readable else f"nothing for {START_TIMEOUT_S:.0f} s"
        if said != READY:
            why = self._log.read_text().strip().splitlines()[-1:]
            raise ClusterError(f"Ray did not start; it said {said!r}: {' '.join(why)}")

    def _wait_until_running(self, names: set[str], deadline_s: float, progress: Progress) -> None:
        started_s = time.monotonic()
        while True:
            applications = self.status()
            states = {name: applications.get(name, {}).get("status", "NOT_STARTED") for name in sorted(names)}
            failed = [name for name, state in states.items() if state in ("DEPLOY_FAILED", "UNHEALTHY")]
            if failed:
                raise ClusterError("; ".join(f"{name}: {_why(applications[name])}" for name in failed))
            if all(state == "RUNNING" for state in states.values()) and self._answers():
                return
            if time.monotonic() > deadline_s:
                raise ClusterError(f"not running in time: {states}")
            shown = ", ".join(f"{name} {state.lower()}" for name, state in states.items())
            progress(f"waiting for replicas: {shown} ({time.monotonic() - started_s:.0f} s)")
            time.sleep(2.0)

    def _answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/-/healthz", timeout=2.0).status_code == 200
        return False

    def _serve_deploy(self, path: Path) -> None:
        command = [str(Path(sys.executable).with_name("serve")), "deploy", str(path)]
        run = subprocess.run(
            [*command, "--address", f"http://{LOOPBACK}:{self.dashboard_port}"],
            env={**os.environ, **self._env},
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        if run.returncode != 0:
            raise ClusterError(f"`serve deploy` failed: {(run.stderr or run.stdout).strip()[-800:]}")

    def _environment(self, stats_port: int, metrics_port: int, fallback_port: int) -> dict[str, str]:
        proxy_dir = self.run_dir / PROXY_DIR
        first = 30_000 + secrets.randbelow(100) * PORTS_A_CLUSTER
        return {
            **DEFAULT_ENV,
            # A machine that joins no cluster: Ray then binds its own sockets to loopback, on Linux too. Without it Ray
            # replaces a loopback address by the machine's own and binds all addresses.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Nothing is worth draining when a cluster of one machine is stopped; 30 s is Ray's default.
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy_dir / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy_dir / "admin.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy_dir),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy_dir / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy_dir / "metrics.sock"),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + PORTS_A_CLUSTER - 1),
        }


def _clean_up_after_killed_runs() -> None:
    """What a killed holder could not stop: its HAProxy and its directory. A living one's are left alone."""
    for run_dir in RUNS.glob(f"{RUN_PREFIX}*"):
        with suppress(OSError, ValueError):
            holder = int((run_dir / HOLDER_FILE).read_text())
            if not Path(f"/proc/{holder}").exists():
                remove_run(run_dir)


def _why(application: dict[str, Any]) -> str:
    """What Serve says: of the deployments that are not healthy, else of the application."""
    unhealthy = [d for d in application.get("deployments", {}).values() if d.get("status") != "HEALTHY"]
    messages = [part.get("message", "").strip() for part in (*unhealthy, application)]
    return next((message for message in messages if message), "no reason given")
