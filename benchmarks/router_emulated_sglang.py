"""sglang-router under load, in front of plain vLLM servers on emulated engines, with vLLM's scheduler or with ours.

It is made fresh by emptying every engine's prefix cache and starting the router anew. Stock engines remember nothing
else; ours keep the adaptive eviction's opinion of LRU.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import httpx
from router_emulated_cells import ENGINE, Router, Scale
from router_emulated_load import MODEL
from router_emulated_systems import (
    ENGINE_ENV,
    RESET_TIMEOUT_S,
    START_TIMEOUT_S,
    FreshBy,
    Say,
    SystemFailed,
    empty_cache,
    engine_policy,
    poll,
    running,
)

from serve_app.deployments.engine_config import EMULATED_LABEL, EMULATED_WORKER, SCHEDULER
from serve_app.local_ray import LOOPBACK
from serve_app.router.ray_internals import free_ports

BENCHMARKS = Path(__file__).resolve().parent


class Sglang:
    """sglang-router in front of plain vLLM servers: the servers stay, the router is started anew for each visit."""

    def __init__(self, scale: Scale, model: Path, python: Path, *, ours_inside: bool, say: Say) -> None:
        self._scale, self._model, self._python = scale, model, python
        self._ours_inside, self._say = ours_inside, say
        self._stack = ExitStack()
        self._router, self._engines = ExitStack(), ExitStack()
        self._engine_urls: list[str] = []
        self._untouched = False
        self._url = ""

    @property
    def url(self) -> str:
        return self._url

    def __enter__(self) -> Self:
        self._logs = Path(self._stack.enter_context(TemporaryDirectory(prefix="fairway-sglang-")))
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._router.close()
        self._engines.close()
        self._stack.close()

    def make_fresh(self, router: Router, *, restart: bool) -> FreshBy:
        self._router.close()
        if restart and not self._untouched:
            self._engines.close()
            self._start()
        for engine_url in self._engine_urls:
            empty_cache(engine_url)
        try:
            self._start_router(router.options)
        except SystemFailed as failure:  # it gives a worker up that does not answer at once, and never asks again
            self._say(f"starting sglang-router once more, for: {failure}")
            self._router.close()
            self._start_router(router.options)
        fresh_by: FreshBy = "restart" if self._untouched else "reset"
        self._untouched = False
        return fresh_by

    def _start(self) -> None:
        self._engines = ExitStack()
        ports = free_ports(self._scale.engines, LOOPBACK)
        self._engine_urls = [f"http://{LOOPBACK}:{port}" for port in ports]
        try:
            servers = [self._engines.enter_context(self._server(port)) for port in ports]
            self._say(f"waiting for vLLM servers on ports {ports}")
            for server, url in zip(servers, self._engine_urls, strict=True):
                poll(partial(_is_up, server, f"{url}/health"), START_TIMEOUT_S, f"no server at {url}", self._last_words)
        except BaseException:
            self._engines.close()
            raise
        self._untouched = True

    def _server(self, port: int) -> AbstractContextManager["subprocess.Popen[bytes]"]:
        command = engine_command(self._scale, self._model, port, ours_inside=self._ours_inside)
        return running(command, self._logs / f"engine-{port}.log", engine_env())

    def _start_router(self, options: Sequence[str]) -> None:
        port, metrics_port = free_ports(2, LOOPBACK)
        self._url = f"http://{LOOPBACK}:{port}"
        command = router_command(self._python, port, metrics_port, self._engine_urls, options)
        self._router = ExitStack()
        self._router.enter_context(running(command, self._logs / "router.log", {}))
        poll(self._router_is_ready, RESET_TIMEOUT_S, "sglang-router has not all workers", self._last_words)

    def _router_is_ready(self) -> bool:
        workers = httpx.get(f"{self._url}/workers", timeout=5.0).json()["workers"]
        return len(workers) == self._scale.engines and all(worker["is_healthy"] for worker in workers)

    def _last_words(self) -> str:
        return "; ".join(path.read_text(errors="replace")[-300:] for path in sorted(self._logs.glob("*.log")))


def engine_command(scale: Scale, model: Path, port: int, *, ours_inside: bool) -> list[str]:
    """A plain vLLM server; the `vllm` command itself does not start with the distribution for CPUs."""
    sections: dict[str, Any] = {"emulation": scale.emulation.model_dump(mode="json")}
    arguments: dict[str, Any] = {**ENGINE, "worker_cls": EMULATED_WORKER, "load_format": "dummy"}
    if ours_inside:
        arguments["scheduler_cls"] = SCHEDULER
        sections["fairway"] = engine_policy(scale).model_dump(mode="json")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", LOOPBACK, "--port", str(port)]
    command += ["--model", str(model), "--served-model-name", MODEL, "--disable-uvicorn-access-log"]
    for name, value in arguments.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    for middleware in (EMULATED_LABEL, "router_emulated_label.EngineName"):
        command += ["--middleware", middleware]
    return [*command, "--additional-config", json.dumps(sections)]


def engine_env() -> dict[str, str]:
    """A server's environment beside the inherited one: the middleware of this folder must be importable."""
    return {**ENGINE_ENV, "PYTHONPATH": str(BENCHMARKS), "PYTHONHASHSEED": "0"}


def router_command(
    python: Path, port: int, metrics_port: int, engine_urls: Sequence[str], options: Sequence[str]
) -> list[str]:
    """sglang-router on loopback, quiet; all else as shipped but for `options`."""
    command = [str(python), "-m", "sglang_router.launch_router", "--host", LOOPBACK, "--port", str(port)]
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(metrics_port), "--log-level", "warn"]
    return [*command, *options, "--worker-urls", *engine_urls]


def _is_up(process: "subprocess.Popen[bytes]", url: str) -> bool:
    """Raises SystemFailed when the process has ended."""
    if process.poll() is not None:
        raise SystemFailed(f"the vLLM server for {url} ended with status {process.returncode}")
    return httpx.get(url, timeout=5.0).status_code == 200
