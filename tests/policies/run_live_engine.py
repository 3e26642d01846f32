"""Changes the policy of a running engine on the CPU and writes what it answered; a process of its own, not a test.

    python -m tests.policies.run_live_engine MODEL_DIRECTORY RESULT.json

One AsyncLLM with vLLM's own engine process serves the same prompts twice, from an empty cache: first nothing is
changed, then fast weight, ordering and eviction are, through vLLM's utilities, while the first prompt decodes and the
others wait.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.policies.live_names import CHANGE_POLICY, POLICY_STATS
from tests.policies.run_engine import prompt_of

FIRST = "short a"
WAITING = ["long 0", "hit 0 a", "hit 1 a", "hit 0 b"]
EXCERPTS = ["excerpt 0", "excerpt 1"]
STARTED_WITH = {"ordering": "fcfs", "eviction": "lru", "fast_weight": 4.0}
CHANGES: list[dict[str, Any]] = [
    {"fast_weight": 8.0},
    {"eviction": "adaptive"},
    {"eviction": "rlt", "protect_waiting": True},
    {"ordering": "fairway-carried", "patience_multiple": 3.0},
]
BAD_CHANGES: list[dict[str, Any]] = [{"fast_weight": 0.5}, {"ordering": "sjf"}, {"seed": 7}]


class Pass:
    """Serves the prompts once, and notes who was served in which order and what was answered."""

    def __init__(self, llm: AsyncLLM, number: int) -> None:
        self._llm, self._number = llm, number
        self.answers: dict[str, list[int]] = {}
        self.first_tokens: list[str] = []
        self.has_begun = asyncio.Event()
        """Whether the first prompt has got a token."""

    async def serve(self, name: str, max_tokens: int) -> None:
        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompt = TokensPrompt(prompt_token_ids=prompt_of(name))
        async for output in self._llm.generate(prompt, greedy, f"{name} {self._number}"):
            if name not in self.answers:
                self.first_tokens.append(name)
            self.answers[name] = list(output.outputs[0].token_ids)
            if name == FIRST:
                self.has_begun.set()

    async def run(self, meanwhile: Awaitable[None] | None) -> None:
        for name in EXCERPTS:
            await self.serve(name, max_tokens=1)
        self.first_tokens.clear()
        lengths = {FIRST: 32} | dict.fromkeys(WAITING, 6)
        tasks = [asyncio.create_task(self.serve(name, length)) for name, length in lengths.items()]
        if meanwhile is not None:
            await self.has_begun.wait()
            await meanwhile
        await asyncio.gather(*tasks)


async def change(llm: AsyncLLM, found: dict[str, Any]) -> None:
    """Change the policy step by step, read it back each time, and try what is refused."""
    call = llm.engine_core.call_utility_async
    found["before"] = await call(POLICY_STATS)
    found["answers_to_changes"] = [await call(CHANGE_POLICY, changes) for changes in CHANGES]
    found["after"] = await call(POLICY_STATS)
    found["refusals"] = []
    for bad in BAD_CHANGES:
        try:
            await call(CHANGE_POLICY, bad)
        except Exception as error:
            found["refusals"].append(str(error))
    found["after_refusals"] = await call(POLICY_STATS)


async def run(model: str) -> dict[str, Any]:
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=1_024,
            max_num_seqs=1,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=40,
            scheduler_cls="serve_app.policies.vllm_hooks.FairwayScheduler",
            additional_config={"fairway": STARTED_WITH},
        )
    )
    try:
        found: dict[str, Any] = {}
        unchanged, changed = Pass(llm, 0), Pass(llm, 1)
        await unchanged.run(None)
        assert await llm.reset_prefix_cache()
        await changed.run(change(llm, found))
        for name, one in (("unchanged", unchanged), ("changed", changed)):
            found[name] = {"answers": one.answers, "first_tokens": one.first_tokens}
        found["at_the_end"] = await llm.engine_core.call_utility_async(POLICY_STATS)
        return found
    finally:
        llm.shutdown()


def main(model: str, result: str) -> None:
    Path(result).write_text(json.dumps(asyncio.run(run(model))))


if __name__ == "__main__":
    main(*sys.argv[1:])
