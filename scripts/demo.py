"""The demo behind `scripts/demo`: a small RAG workload on two real CPU replicas, routed by LBGR and by round robin."""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import openai
import yaml
from demo_workload import Ask, workload
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.local_cluster import ClusterError, LocalCluster

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "local.yaml"
MODEL = "smollm2-135m-instruct"
OUTPUT_TOKENS = 8
SAY_EVERY = 9
"""Answers a line of progress where there is no terminal."""

console = Console()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    label: str
    replica: str
    prompt_tokens: int
    cached_tokens: int
    predicted_ms: float
    observed_ms: float
    text: str
    error: str = ""


async def run_workload(url: str, asks: Sequence[Ask], title: str) -> list[Answer]:
    """Send every request at its time; progress is visible."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="not-needed", max_retries=0, timeout=300)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(title, total=len(asks))

        async def one(ask: Ask) -> Answer:
            await asyncio.sleep(ask.at_s)
            answer = await send(client, ask)
            progress.advance(bar)
            done = int(progress.tasks[bar].completed)
            if not console.is_terminal and done % SAY_EVERY == 0:
                console.print(f"{title}: {done} of {len(asks)} answered")
            return answer

        return list(await asyncio.gather(*(one(ask) for ask in asks)))


async def send(client: openai.AsyncOpenAI, ask: Ask) -> Answer:
    """One streamed chat completion, timed to its first chunk."""
    started_s = time.monotonic()
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=ask.messages,
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        first_s, text, usage = 0.0, "", None
        async for chunk in raw.parse():
            first_s = first_s or time.monotonic()
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    except openai.OpenAIError as error:
        return Answer(ask.label, "", 0, 0, 0.0, 0.0, "", error=f"{type(error).__name__}: {error}")
    if usage is None:
        return Answer(ask.label, "", 0, 0, 0.0, 0.0, "", error="the stream ended without a usage chunk")
    details = usage.prompt_tokens_details
    return Answer(
        label=ask.label,
        replica=raw.headers.get("x-fairway-replica", ""),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        predicted_ms=float(raw.headers.get("x-fairway-predicted-ms", "nan")),
        observed_ms=(first_s - started_s) * 1e3,
        text=text,
    )


def show(answers: Sequence[Answer], title: str) -> None:
    """The table: one line a request, in order of sending."""
    table = Table(title=title)
    for name in ("request", "replica", "prompt tokens", "cached tokens", "predicted ms", "observed ms"):
        table.add_column(name, justify="left" if name in ("request", "replica") else "right")
    for a in answers:
        figures = (str(a.prompt_tokens), str(a.cached_tokens), f"{a.predicted_ms:,.0f}", f"{a.observed_ms:,.0f}")
        table.add_row(a.label, a.error or a.replica, *figures)
    console.print(table)


def figures(answers: Sequence[Answer]) -> dict[str, str]:
    """Hit rate, TTFT and balance of one run."""
    good = [answer for answer in answers if not answer.error]
    if len(good) < 2:
        return {"failed": str(len(answers) - len(good))}
    ttft_s = [answer.observed_ms / 1e3 for answer in good]
    hits = sum(a.cached_tokens for a in good) / sum(a.prompt_tokens for a in good)
    counts = [sum(a.replica == name for a in good) for name in {a.replica for a in good}]
    return {
        "hit rate": f"{hits:.2f}",
        "TTFT median s": f"{median(ttft_s):.2f}",
        "TTFT p99 s": f"{quantiles(ttft_s, n=100, method='inclusive')[98]:.2f}",
        "requests per replica": " / ".join(str(count) for count in sorted(counts, reverse=True)),
        "failed": str(len(answers) - len(good)),
    }


def shortcomings(answers: Sequence[Answer]) -> list[str]:
    """What a run should not show: failed answers, no cache hit at all, an idle replica, an answer not predicted."""
    good = [answer for answer in answers if not answer.error]
    found = [f"{answer.label}: {answer.error}" for answer in answers if answer.error]
    found += [
        f"{a.label}: no prediction or no replica in its headers" for a in good if not a.replica or isnan(a.predicted_ms)
    ]
    if not any(answer.cached_tokens for answer in good):
        found.append("no prompt token was found cached")
    if len({answer.replica for answer in good}) < 2:
        found.append("one replica got every request")
    return found


def show_side_by_side(runs: dict[str, dict[str, str]]) -> None:
    """One column a run."""
    table = Table(title="the same workload")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for row in next(iter(runs.values())):
        table.add_row(row, *(figures.get(row, "") for figures in runs.values()))
    console.print(table)


def learner_line(url: str) -> str:
    """The residual's error so far, of the ingress replica that learned most."""
    state = httpx.get(f"{url}/fairway/state", timeout=10).json()
    residual = max((one["residual"] for one in state["ingresses"]), key=lambda r: int(r["samples"]))
    mae = residual["mae_s"]
    error = "unknown" if mae is None else f"{mae:.2f} s mean absolute"
    return f"learner: {residual['samples']} completions, error {error}, {'cold' if residual['cold'] else 'in use'}"


def switch_router(cluster: LocalCluster, router: str) -> None:
    """Change the live routing document as an operator would."""
    headers = {"Authorization": f"Bearer {cluster.token}"}
    document = httpx.get(f"{cluster.url}/fairway/weights", timeout=10).json()
    answer = httpx.put(
        f"{cluster.url}/fairway/weights", json={**document, "router": router}, headers=headers, timeout=10
    )
    answer.raise_for_status()


def open_reservations(url: str, timeout_s: float = 30.0) -> int:
    """Requests still booked on any replica, once the last life-cycle events had time to arrive."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        state = httpx.get(f"{url}/fairway/state", timeout=10).json()
        booked = sum(int(replica["num_open"]) for replica in state["replicas"])
        if booked == 0 or time.monotonic() > deadline_s:
            return booked
        time.sleep(0.5)


def serve_config(cluster: LocalCluster, **policy: str) -> dict[str, Any]:
    """configs/local.yaml with this run's token and directory, and with other policies where given."""
    config: dict[str, Any] = deepcopy(yaml.safe_load(CONFIG.read_text()))
    serving, control = config["applications"]
    engine = serving["args"]["engine"]
    engine["prefill_profile"] = str(ROOT / engine["prefill_profile"])
    control["args"].update(token=cluster.token, state_dir=str(cluster.run_dir / "control"))
    if policy:
        engine["policy"] = {"ordering": policy["ordering"], "eviction": policy["eviction"]}
        serving["args"]["router"] = {"routing": {"router": policy["router"]}}
        control["args"]["state_dir"] = str(cluster.run_dir / "control-compare")
    return config


def deploy(cluster: LocalCluster, title: str, config: dict[str, Any]) -> None:
    """Deploy with progress: a spinner on a terminal, a line every ten seconds elsewhere."""
    console.print(title)
    shown_s = time.monotonic()

    def tell(text: str) -> None:
        nonlocal shown_s
        if console.is_terminal:
            status.update(text)
        elif time.monotonic() - shown_s >= 10:
            shown_s = time.monotonic()
            console.print(text)

    with console.status(title) as status:
        cluster.deploy(config, progress=tell)


def capital_of_france(url: str) -> str:
    """A fixed greedy question that shows real weights."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="not-needed", max_retries=0, timeout=120)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=16,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


def play(cluster: LocalCluster, compare: bool) -> list[str]:
    """The whole demo on a running cluster; returns what went wrong."""
    problems = []
    deploy(cluster, "deploying two replicas", serve_config(cluster))
    answer = capital_of_france(cluster.url)
    console.print(f"What is the capital of France? [bold]{answer}[/bold]")
    if "Paris" not in answer:
        problems.append(f"the capital of France was said to be {answer!r}")
    runs = {}
    for router in ("lbgr", "round-robin"):
        switch_router(cluster, router)
        answers = asyncio.run(run_workload(cluster.url, workload(router), f"router {router}"))
        show(answers, f"router {router}")
        runs[router] = figures(answers)
        problems += shortcomings(answers)
        console.print(learner_line(cluster.url))
    switch_router(cluster, "lbgr")
    booked = open_reservations(cluster.url)
    if booked:
        problems.append(f"{booked} reservations are still open")
    if compare:
        plain = serve_config(cluster, ordering="fcfs", eviction="lru", router="round-robin")
        deploy(cluster, "redeploying with FCFS, LRU and round robin", plain)
        answers = asyncio.run(run_workload(cluster.url, workload("plain"), "FCFS + LRU + round robin"))
        runs["fcfs + lru + round robin"] = figures(answers)
        problems += shortcomings(answers)
    show_side_by_side(runs)
    return problems


def main() -> int:
    """Entry point of `scripts/demo`."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop everything at the end; exit 1 if any answer failed")
    parser.add_argument("--compare", action="store_true", help="redeploy with FCFS + LRU + round robin and compare")
    args = parser.parse_args()
    started_s = time.monotonic()
    try:
        with LocalCluster(progress=console.print) as cluster:
            problems = play(cluster, args.compare)
            console.print(
                f"OpenAI API: {cluster.url}/v1   state: {cluster.url}/fairway/state   page: {cluster.url}/fairway/"
            )
            for problem in problems:
                console.print(f"[red]{problem}")
            console.print(f"took {time.monotonic() - started_s:.0f} s")
            if not args.once:
                console.print("running until Ctrl-C")
                while True:
                    time.sleep(1)
    except KeyboardInterrupt:
        return 130
    except ClusterError as error:
        console.print(f"[red]{error}")
        return 1
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
