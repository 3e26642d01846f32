"""A served application on emulated engines, for tests of faults and of load: one cluster for all that import `served`.

Every token of an emulated engine is a function of its prompt, so `ask` checks each stream: none lost, none repeated.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.emulation.pseudo_text import expected_tokens
from serve_app.emulation.settings import EmulationSettings
from serve_app.emulation.step_time import prefill_table
from serve_app.local_cluster import LocalCluster
from tests.served.conftest import ROOT, model_dir

MODEL = "emulated"
LONGEST_TOKENS = 40_960
EMULATION = EmulationSettings(step_base_s=0.005, s_per_token=1e-4, kv_blocks=10_000)
IDLE_WITHIN_S = 30.0
"""A release may wait for the next list of open requests after a reservation's grace, or for a replica's departure."""
REPLACED_WITHIN_S = 240.0
"""A replica starts within half a minute on two cores that are its own."""
_SHARED = pytest.StashKey["Served"]()


def emulated_config(cluster: LocalCluster) -> dict[str, Any]:
    """configs/emulated.yaml with room for long prompts, every decision kept, and this run's token and directories."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "emulated.yaml").read_text())
    serving, control = config["applications"]
    args, engine = serving["args"], serving["args"]["engine"]
    args["model"] = {"id": MODEL, "source": str(model_dir())}
    args["router"] = {"decisions_kept": 50_000}
    engine["emulation"] = EMULATION.model_dump(mode="json")
    engine["vllm"] |= {"max_model_len": LONGEST_TOKENS, "hf_overrides": {"max_position_embeddings": LONGEST_TOKENS}}
    table = prefill_table(EMULATION, engine["vllm"]["max_num_batched_tokens"], LONGEST_TOKENS)
    engine["policy"]["prefill_profile"] = table.model_dump(mode="json")
    control["args"].update(token=cluster.token, state_dir=str(cluster.run_dir / "control"))
    return config


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest) -> Iterator["Served"]:
    """Two emulated replicas and two ingresses; modules that import this fixture share them."""
    stash = request.session.stash
    if _SHARED in stash:
        yield stash[_SHARED]
        return
    model_dir()
    with LocalCluster(num_gpus=2, progress=print) as cluster:
        cluster.deploy(emulated_config(cluster))
        with httpx.Client(base_url=cluster.url, timeout=60) as http:
            stash[_SHARED] = Served(cluster, http)
            yield stash[_SHARED]
    del stash[_SHARED]


@dataclass(frozen=True)
class Process:
    """A replica as Serve lists it."""

    replica_id: str
    pid: int

    @property
    def engine_pid(self) -> int:
        """The process of vLLM's engine core, which the replica's process started."""
        (engine,) = [pid for pid, command in _children(self.pid).items() if b"EngineCore" in command]
        return engine


class Served:
    """The running application."""

    def __init__(self, cluster: LocalCluster, http: httpx.Client) -> None:
        self.cluster = cluster
        self.http = http

    def state(self) -> dict[str, Any]:
        """GET /fairway/state; asked again while control says that no ingress answered in time, as on a busy machine."""
        answers: list[httpx.Response] = []

        def is_there() -> bool:
            answers.append(self.http.get("/fairway/state"))
            return answers[-1].status_code != 503

        until(is_there, 60, lambda: answers[-1].text)
        return dict(answers[-1].raise_for_status().json())

    def replicas(self) -> list[Process]:
        """The engines' replicas that run now."""
        return self._running("FairwayServer:")

    def ingresses(self) -> list[Process]:
        """The ingress replicas that run now."""
        return self._running("LLMRouter")

    def _running(self, name: str) -> list[Process]:
        deployments = self.cluster.status()["fairway"]["deployments"]
        (deployment,) = [one for key, one in deployments.items() if key.startswith(name)]
        replicas = [one for one in deployment["replicas"] if one["state"] == "RUNNING"]
        return [Process(one["replica_id"], one["pid"]) for one in replicas]

    def both_replicas(self, other_than: str = "") -> list[Process]:
        """Two replicas that every ingress knows, `other_than` not among them; waits for those that start."""

        def are_there() -> bool:
            now = {one.replica_id for one in self.replicas()}
            return len(now) == 2 and other_than not in now and all(seen == now for seen in self.seen_replicas())

        until(are_there, REPLACED_WITHIN_S, lambda: f"both replicas: {self.replicas()}, {self.seen_replicas()}")
        return self.replicas()

    def seen_replicas(self) -> list[set[str]]:
        """The replica ids that each ingress knows."""
        return [{replica["replica_id"] for replica in one["replicas"]} for one in self.state()["ingresses"]]

    def left_open(self) -> list[dict[str, Any]]:
        """What is not at rest: replicas with a reservation or any load, as any ingress sees them."""
        per_ingress = [replica for one in self.state()["ingresses"] for replica in one["replicas"]]
        return [replica for replica in per_ingress if replica["num_open"] or replica["load_s"] != 0.0]

    def wait_until_idle(self) -> None:
        """Until every load is exactly 0 on every ingress.

        It must then stay so while both replicas list their open requests again: one that they hold open counts anew.
        """
        until(lambda: not self.left_open(), IDLE_WITHIN_S, lambda: f"reservations left: {self.left_open()}")
        enough = {ingress: count + 6 for ingress, count in self._batches().items()}
        until(lambda: all(n >= enough.get(ingress, 0) for ingress, n in self._batches().items()), 30, "open lists")
        assert not self.left_open()

    def _batches(self) -> dict[str, int]:
        return {one["ingress"]: one["totals"]["batches"] for one in self.state()["ingresses"]}


OUTCOMES = ("finished", "aborted", "rejected", "failed")
COUNTED = ("decisions", *OUTCOMES, "orphans")


def accounts(state: dict[str, Any]) -> dict[str, int]:
    """Decisions, each kind of end and orphans, over all ingresses, since their start."""
    return {name: sum(one["totals"][name] for one in state["ingresses"]) for name in COUNTED}


def since(before: dict[str, int], state: dict[str, Any]) -> dict[str, int]:
    """`accounts` less what they were."""
    return {name: count - before[name] for name, count in accounts(state).items()}


def until(condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> float:
    """Poll until it holds; returns the seconds that took, and fails saying what was waited for."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            pytest.fail(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.1)
    return time.monotonic() - started_s


@dataclass(slots=True)
class Answer:
    """What became of one streamed completion."""

    status: int = 0
    """HTTP status; 0 when the connection failed before it came."""
    replica_id: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_complete: bool = False
    """The stream came to its proper end."""
    error: str = ""
    """What the client was told, or what broke."""
    began_s: float = field(default_factory=time.monotonic)
    """Monotonic time of sending."""
    took_s: float = 0.0

    def check(self, max_tokens: int) -> None:
        """Every token in its place, none twice, and either a whole answer or a clear error."""
        expected = expected_tokens(EMULATION, self.prompt_token_ids, max_tokens)
        assert self.token_ids == expected[: len(self.token_ids)], self
        assert self.is_complete == (len(self.token_ids) == max_tokens and not self.error), self
        assert self.is_complete or self.error, self


async def ask(http: httpx.AsyncClient, prompt: str, max_tokens: int, **fields: Any) -> Answer:
    """Stream one completion to its end, whatever that is."""
    answer = Answer()
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **fields}
    try:
        async with http.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as stream:
            answer.status = stream.status_code
            answer.replica_id = stream.headers.get("x-fairway-replica", "")
            if answer.status != 200:
                answer.error = (await stream.aread()).decode() or f"status {answer.status} without a word"
            else:
                await _read(stream, answer)
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.took_s = time.monotonic() - answer.began_s
    return answer


async def _read(stream: httpx.Response, answer: Answer) -> None:
    async for line in stream.aiter_lines():
        data = line.removeprefix("data: ")
        if data == line:
            continue
        if data == "[DONE]":
            answer.is_complete = not answer.error
            return
        chunk = json.loads(data)
        answer.error = str(chunk.get("error", answer.error))
        for choice in chunk.get("choices", ()):
            answer.prompt_token_ids = choice.get("prompt_token_ids") or answer.prompt_token_ids
            answer.token_ids += choice.get("token_ids") or []
    answer.error = answer.error or "the stream ended without [DONE]"


def client(served: Served, timeout_s: float = 60.0) -> httpx.AsyncClient:
    """An asynchronous client of its own connections."""
    return httpx.AsyncClient(base_url=served.cluster.url, timeout=timeout_s, limits=httpx.Limits(max_connections=200))


async def ask_all(http: httpx.AsyncClient, prompts: Iterable[str], max_tokens: int) -> list[Answer]:
    """Ask for all at the same moment."""
    return list(await asyncio.gather(*(ask(http, prompt, max_tokens) for prompt in prompts)))


@asynccontextmanager
async def traffic(
    http: httpx.AsyncClient, prompts: Iterator[str], max_tokens: int, num_users: int = 6, pause_s: float = 0.2
) -> AsyncIterator[list[Answer]]:
    """Users who ask one prompt after the other; yields their answers so far and lets the last ones end."""
    answers: list[Answer] = []
    is_over = asyncio.Event()

    async def user() -> None:
        while not is_over.is_set():
            answers.append(await ask(http, next(prompts), max_tokens))
            await asyncio.sleep(pause_s)

    users = [asyncio.create_task(user()) for _ in range(num_users)]
    try:
        yield answers
    finally:
        is_over.set()
        await asyncio.gather(*users)


async def more_answers(answers: list[Answer], count: int, timeout_s: float = 120.0) -> None:
    """Return once so many more have come."""
    enough = len(answers) + count
    async with asyncio.timeout(timeout_s):
        while len(answers) < enough:  # noqa: ASYNC110  # what the users append is the condition
            await asyncio.sleep(0.05)


def words(name: str, num_tokens: int) -> str:
    """About so many tokens of text that shares no prefix with any other name's."""
    return f"{name}:" + " word" * num_tokens


def share_of(replica_id: str, answers: list[Answer]) -> float:
    """The replica's part of the answers, 0 to 1."""
    return sum(answer.replica_id == replica_id for answer in answers) / len(answers)


def largest_share(answers: list[Answer]) -> float:
    """The largest replica's part of the answers, as a multiple of the mean over two replicas."""
    return 2 * max(share_of(replica_id, answers) for replica_id in {answer.replica_id for answer in answers})


def _children(pid: int) -> dict[int, bytes]:
    """Processes below this one, at any depth, with their command lines."""
    parents: dict[int, int] = {}
    commands: dict[int, bytes] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            commands[int(process.name)] = (process / "cmdline").read_bytes()
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return {child: commands[child] for child in found}


def end(pid: int, signal_number: int) -> None:
    """Send a signal to one process that this cluster started."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)
