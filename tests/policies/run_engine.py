"""Runs one real engine on the CPU over a fixed workload and writes what it answered; a process of its own, not a test.

    python -m tests.policies.run_engine stock|fairway MODEL_DIRECTORY RESULT.json

The workload has more distinct tokens than the KV cache holds, prefixes that are shared, and long misses that arrive
before short hits.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, KVEventBatch
from vllm.inputs import TokensPrompt
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from serve_app.policies.vllm_hooks import FairwayScheduler

EXCERPT_TOKENS = 256
LONG_TOKENS = 640
ROUNDS = [
    ["excerpt 0", "excerpt 1"],
    ["long 0", "hit 0 a", "short a", "hit 1 a", "hit 0 b", "hit 1 b", "hit 0 c"],
    ["long 1", "excerpt 2", "hit 2 a", "hit 0 d", "short b"],
]
"""Names of prompts: each round is submitted at once, when the round before is done."""


class RecordsStarts:
    """Notes which prompts start, in order, and how many KV blocks are evicted."""

    starts: list[tuple[int, ...]]
    num_evicted_blocks: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.starts = []
        self.num_evicted_blocks = 0
        self.kv_event_publisher = self

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)  # type: ignore[misc]  # the scheduler that this is mixed into
        self.starts += [tuple(new.prompt_token_ids) for new in output.scheduled_new_reqs]
        return output

    def publish(self, batch: KVEventBatch) -> None:
        self.num_evicted_blocks += sum(isinstance(event, BlockRemoved) for event in batch.events)

    def shutdown(self) -> None:
        """As scheduler and as its publisher: nothing is open."""


class StockStarts(RecordsStarts, AsyncScheduler):  # type: ignore[misc]  # vLLM is untyped here
    """Stock vLLM."""


class FairwayStarts(RecordsStarts, FairwayScheduler):
    """Fairway and RLT."""


def prompt_of(name: str) -> list[int]:
    """Token ids of a named prompt: a hit continues its excerpt, everything else shares nothing."""
    kind, which, *_ = name.split()
    rng = random.Random(name)
    num_tokens = {"excerpt": EXCERPT_TOKENS, "long": LONG_TOKENS, "hit": 40, "short": 60}[kind]
    own = [rng.randrange(1_000, 40_000) for _ in range(num_tokens)]
    return prompt_of(f"excerpt {which}") + own if kind == "hit" else own


def main(which: str, model: str, result: str) -> None:
    scheduler_cls = {"stock": StockStarts, "fairway": FairwayStarts}[which]
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=1_024,
        max_num_seqs=3,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=40,
        scheduler_cls=f"tests.policies.run_engine.{scheduler_cls.__name__}",
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        additional_config={"fairway": {"ordering": "fairway", "eviction": "rlt"}},
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    for names in ROUNDS:
        prompts = [TokensPrompt(prompt_token_ids=prompt_of(name)) for name in names]
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        answers |= {name: list(out.outputs[0].token_ids) for name, out in zip(names, outputs, strict=True)}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    name_of = {tuple(prompt_of(name)): name for name in answers}
    starts = [name_of[prompt] for prompt in scheduler.starts]
    found = {"answers": answers, "starts": starts, "num_evicted_blocks": scheduler.num_evicted_blocks}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
