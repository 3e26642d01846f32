"""Does a whole engine with our scheduler serve as many tokens a second as stock vLLM?

Two vLLM engines on the CPU stand side by side, each in its own process, one with vLLM's scheduler and one with ours and
its default policy. Round after round both get the same prompts, one engine after the other, first the one, then the
other. All prompts of a round are submitted at once, so that a queue waits, and no two share a prefix: there is nothing
to win, only what our scheduler costs. Tokens a second are given by wall time, which is what counts and needs a machine
that does nothing else, and by CPU time of the engine's processes, which other work disturbs little. One compute thread
an engine: two would wait for each other by spinning, which CPU time can't tell from work.

    python benchmarks/engine_throughput.py
"""

import os
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.config import ModelSettings
from serve_app.model_files import why_incomplete

# Before vLLM is imported, and inherited by the engines' processes.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

DEFAULT_MODEL = Path(ModelSettings().source)
SCHEDULERS: dict[str, dict[str, Any]] = {
    "stock": {},
    "ours": {"scheduler_cls": "serve_app.policies.vllm_hooks.FairwayScheduler", "additional_config": {"fairway": {}}},
}
"""vLLM's arguments by the name of the engine."""
MIN_RATIO = 0.98
"""Bound of ours / stock, tokens a second."""
MAX_RUNNING = 16
STEP_TOKENS = 512
BLOCK_TOKENS = 32
"""The CPU attention wants a multiple of 32."""
PROMPT_TOKENS = (32, 256)
"""Shortest and longest prompt, drawn uniformly."""
FIRST_TOKEN, LAST_TOKEN = 1_000, 40_000
"""Range of the random prompts' tokens, clear of the special ones."""


class Engine:
    """One engine in a process of its own, and what its rounds took."""

    def __init__(self, model: Path, scheduler: dict[str, Any], output_tokens: int) -> None:
        import vllm

        known = _children()
        self._llm: Any = vllm.LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=PROMPT_TOKENS[1] + output_tokens + BLOCK_TOKENS,
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=True,
            use_tqdm_on_load=False,
            **scheduler,
        )
        self._processes = _children() - known
        assert self._processes, "vLLM started no process of its own; unset VLLM_ENABLE_V1_MULTIPROCESSING"
        self._sampling = vllm.SamplingParams(
            max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self.per_s: list[float] = []
        """Tokens, prompt and output, a second of wall time; one number for each round."""
        self.per_cpu_s: list[float] = []
        """Tokens a second of CPU time."""

    def serve(self, prompts: list[list[int]]) -> None:
        """One round: every prompt and its output, submitted at once."""
        begun_cpu_s, begun_s = self._cpu_s(), time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], self._sampling, use_tqdm=False)
        elapsed_s = time.perf_counter() - begun_s
        assert not any(output.num_cached_tokens for output in outputs), "a prompt of this round was cached"
        num_tokens = sum(len(out.prompt_token_ids) + len(out.outputs[0].token_ids) for out in outputs)
        self.per_s.append(num_tokens / elapsed_s)
        self.per_cpu_s.append(num_tokens / (self._cpu_s() - begun_cpu_s))

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _cpu_s(self) -> float:
        return sum(_cpu_s(process) for process in self._processes)


def main(
    model: Annotated[Path, typer.Option(help="The model's directory.")] = DEFAULT_MODEL,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each engine; one more warms up.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests a round.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=1)] = 16,
    seed: int = 0,
) -> None:
    """Print one row for each round, the medians, and whether the bound is met."""
    model = model.expanduser()
    if (why := why_incomplete(model)) is not None:
        raise typer.BadParameter(f"{why}; `fairway-serve prepare-model` makes the demo's model", param_hint="--model")
    print(f"python benchmarks/engine_throughput.py --rounds {rounds} --requests {requests} "
          f"--output-tokens {output_tokens} --seed {seed}\n")  # fmt: skip
    engines = {name: Engine(model, scheduler, output_tokens) for name, scheduler in SCHEDULERS.items()}
    print("| round | stock tokens/s | ours | ours / stock | stock tokens/CPU s | ours | ours / stock |")
    print("| --- |" + " ---: |" * 6)
    try:
        for number in range(1 + rounds):
            prompts = _prompts(random.Random(f"{seed}-{number}"), requests)
            names = list(engines) if number % 2 else list(reversed(engines))
            for name in names:
                engines[name].serve(prompts)
            if number:
                print(_row(str(number), *[values[-1] for values in _columns(engines)]), flush=True)
    finally:
        for engine in engines.values():
            engine.stop()
    medians = [statistics.median(values[1:]) for values in _columns(engines)]
    print(_row("median", *medians) + "\n")
    for what, stock, ours in (("wall", medians[0], medians[1]), ("CPU", medians[2], medians[3])):
        verdict = "met" if ours >= MIN_RATIO * stock else "MISSED"
        print(f"{what} time, medians: ours / stock {ours / stock:.3f}, bound {MIN_RATIO}: {verdict}")


def _prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Random tokens of random lengths: no two begin alike."""
    prompts = [[rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(count)]
    assert len({tuple(prompt[:BLOCK_TOKENS]) for prompt in prompts}) == count
    return prompts


def _columns(engines: dict[str, Engine]) -> list[list[float]]:
    stock, ours = engines["stock"], engines["ours"]
    return [stock.per_s, ours.per_s, stock.per_cpu_s, ours.per_cpu_s]


def _row(name: str, stock: float, ours: float, stock_cpu: float, ours_cpu: float) -> str:
    by_wall, by_cpu = (f"{a:.1f} | {b:.1f} | {b / a:.3f}" for a, b in ((stock, ours), (stock_cpu, ours_cpu)))
    return f"| {name} | {by_wall} | {by_cpu} |"


def _children() -> set[int]:
    """Ids of this process' children and theirs."""
    found, parents = set[int](), [os.getpid()]
    while parents:
        for task in Path(f"/proc/{parents.pop()}/task").iterdir():
            new = [int(child) for child in (task / "children").read_text().split()]
            found.update(new)
            parents += new
    return found


def _cpu_s(process: int) -> float:
    """User and system seconds of all its threads (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    typer.run(main)
