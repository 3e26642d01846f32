"""What the systems under load have in common: how one is used, how processes are held, and how an engine is emptied."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol, Self

import httpx
from router_emulated_cells import MAX_MODEL_TOKENS, MAX_STEP_TOKENS, Router, Scale

from serve_app.config import EnginePolicy
from serve_app.emulation.step_time import prefill_table

START_TIMEOUT_S = 900.0
RESET_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.25
PR_SET_PDEATHSIG = 1
"""prctl(2)'s number for it."""
ENGINE_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",  # serves /reset_prefix_cache
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Environment of every engine."""

Say = Callable[[str], None]
FreshBy = Literal["restart", "reset"]


class SystemFailed(RuntimeError):
    """A system did not start, or did not become fresh; the message says which part and why."""


class System(Protocol):
    """Something that serves the OpenAI API at `url` once `make_fresh` has returned; a context manager, used once."""

    @property
    def url(self) -> str: ...

    def make_fresh(self, router: Router, *, restart: bool) -> FreshBy:
        """Serve by `router` from now on, with nothing left of what was served before. Raises SystemFailed.

        Args: restart: start everything anew, even where emptying would leave nothing behind.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def engine_policy(scale: Scale) -> EnginePolicy:
    """Our defaults inside the engines, and what their prefills take."""
    return EnginePolicy(prefill_profile=prefill_table(scale.emulation, MAX_STEP_TOKENS, MAX_MODEL_TOKENS))


def empty_cache(engine_url: str) -> None:
    """Empty an engine's prefix cache; waits until its last blocks are free.

    Raises:
        SystemFailed: it still holds blocks after a while.
    """

    def emptied() -> bool:
        try:
            answer = httpx.post(f"{engine_url}/reset_prefix_cache", timeout=30.0)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise SystemFailed(f"{engine_url} did not empty its prefix cache: {error}") from error
        return bool(answer.json()["success"])

    poll(emptied, RESET_TIMEOUT_S, f"the prefix cache at {engine_url} could not be emptied")


@contextmanager
def running(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """The command in a process group of its own, which is ended at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            preexec_fn=_end_with_parent,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_group(process)


def _end_with_parent() -> None:
    """Ask Linux to end the calling process when its parent dies, were it killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ask the process to end, and make what is left of its group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def poll(done: Callable[[], bool], timeout_s: float, why: str, last_words: Callable[[], str] = lambda: "") -> None:
    """Ask until it is done.

    Raises:
        SystemFailed: after `timeout_s`; it says `why`, the last HTTP error and the last words.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        error: httpx.HTTPError | None = None
        try:
            if done():
                return
        except httpx.HTTPError as failure:  # what has just started may not answer yet
            error = failure
        if time.monotonic() > deadline_s:
            raise SystemFailed(f"after {timeout_s:.0f} s {why}. {error or ''} {last_words()}")
        time.sleep(POLL_S)
