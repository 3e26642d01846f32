"""Follows the figures of a running emulated engine and writes what was reported; a process of its own, not a test.

    python -m tests.deployments.run_engine_load RESULT.json

One AsyncLLM with vLLM's own engine process serves more prompts than it may run at once; then all are aborted.
"""

import asyncio
import json
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.deployments.event_forwarder import EngineLoad
from serve_app.deployments.worker import ask_scheduler, follow_counts
from serve_app.policies.live_names import POLICY_STATS
from tests.emulation.conftest import write_tiny_llama

NUM_PROMPTS = 24
RUNNING_AT_ONCE = 4
PROMPT_TOKENS = 100
OUTPUT_TOKENS = 40
STEP_S = 0.02


async def generate(llm: AsyncLLM, name: str, number: int, output_tokens: int) -> None:
    """Serve one prompt to its end."""
    prompt = TokensPrompt(prompt_token_ids=[100 + number] * PROMPT_TOKENS)
    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    async for _ in llm.generate(prompt, sampling, f"{name} {number}"):
        pass


async def reports(load: EngineLoad, tasks: list[asyncio.Task[None]], until_s: float) -> list[dict[str, Any]]:
    """What is reported while the tasks run, every few milliseconds, with the reporter's own lateness."""
    found = []
    while not all(task.done() for task in tasks) and time.monotonic() < until_s:
        began_s = time.monotonic()
        if (report := load.report(is_idle=False)) is not None:
            found.append(asdict(report) | {"open": sum(not task.done() for task in tasks)})
        await asyncio.sleep(0.01)
        if found:
            found[-1]["late_s"] = time.monotonic() - began_s - 0.01
    return found


async def run(model: Path) -> dict[str, Any]:
    args = AsyncEngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        block_size=16,
        max_model_len=1_024,
        max_num_seqs=RUNNING_AT_ONCE,
        max_num_batched_tokens=512,
        scheduler_cls="serve_app.policies.vllm_hooks.FairwayScheduler",
        worker_cls="serve_app.emulation.worker.EmulatedGpuWorker",
        additional_config={"emulation": {"step_base_s": STEP_S, "s_per_token": 0.0}},
    )
    llm = AsyncLLM.from_engine_args(args)
    num_asked = 0

    async def queued_tokens() -> int:
        nonlocal num_asked
        num_asked += 1
        return int((await ask_scheduler(llm, POLICY_STATS))["waiting_todo_tokens"])

    load = EngineLoad(queued_tokens)
    follow_counts(llm, load)
    try:
        began_s = time.monotonic()
        served = [asyncio.create_task(generate(llm, "served", n, OUTPUT_TOKENS)) for n in range(NUM_PROMPTS)]
        busy = await reports(load, served, began_s + 120)
        found: dict[str, Any] = {"busy": busy, "busy_s": time.monotonic() - began_s, "num_asked": num_asked}
        found["after_the_last"] = await settled(load)
        aborted = [asyncio.create_task(generate(llm, "aborted", n, 900)) for n in range(NUM_PROMPTS)]
        found["before_the_abort"] = await reports(load, aborted, time.monotonic() + 1.0)
        for task in aborted:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        found["after_the_abort"] = await settled(load)
        return found
    finally:
        llm.shutdown()


async def settled(load: EngineLoad) -> dict[str, Any] | None:
    """The report once it says that the engine is empty, or what it says after ten seconds."""
    until_s = time.monotonic() + 10
    while True:
        report = load.report(is_idle=True)
        if report is not None and (report.running == report.waiting == 0 or time.monotonic() > until_s):
            return asdict(report)
        await asyncio.sleep(0.01)


def main(result: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_llama(Path(directory))
        Path(result).write_text(json.dumps(asyncio.run(run(model))))


if __name__ == "__main__":
    main(*sys.argv[1:])
