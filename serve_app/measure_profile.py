"""Measure how long an engine takes to prefill, once per device and model, and keep it as a `PrefillTable`.

A random prompt is prefilled cold, then its whole KV blocks are asked for again with one new token behind them. Cold
medians make the table (never falling: a running maximum, since a longer prompt is never less work). A straight line
through the cached runs splits what a hit costs into `base_s` and `hit_s_per_token`.
"""

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from serve_app.config import PrefillTable

BLOCK_TOKENS = 32
"""The CPU attention wants a multiple of 32; cached runs are cut to whole blocks of this size."""
STEP_TOKENS = 2048
"""Token budget of an engine step during the measurement."""
WARM_UP_RUNS = 2
MAX_ERROR_CHARACTERS = 400
"""Of vLLM's own message when it does not start."""

Report = Callable[[str, int, int], None]
"""Called with phase, runs done, runs in all (0 while unknown)."""


class ProfileError(RuntimeError):
    """The measurement could not be made or written; the message says what to do."""


class Engine(Protocol):
    """What is measured."""

    num_vocabulary: int

    def prefill(self, token_ids: Sequence[int]) -> int:
        """Compute the prompt and one token; how many prompt tokens were found cached."""


@dataclass(slots=True)
class LengthTimes:
    """All runs of one prompt length."""

    num_tokens: int
    cold_s: list[float] = field(default_factory=list)
    cached_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0


def measure(
    engine: Engine, lengths: Sequence[int], repeats: int, limit_s: float, report: Report, seed: int = 0
) -> list[LengthTimes]:
    """Every length once, then again, up to `repeats` times or until `limit_s` seconds have passed.

    Raises:
        ProfileError: the time was over before every length had run once.
    """
    rng = random.Random(seed)
    times = [LengthTimes(length) for length in sorted(set(lengths))]
    started_s = time.monotonic()
    for _ in range(WARM_UP_RUNS):
        engine.prefill(_random_prompt(rng, engine, times[0].num_tokens))
    total = repeats * len(times)
    report("measure", 0, total)
    for done in range(total):
        if time.monotonic() - started_s > limit_s:
            if done < len(times):
                raise ProfileError(f"{limit_s:.0f} s were over before every length had run; give shorter --lengths")
            break
        _run_once(engine, times[done % len(times)], rng)
        report("measure", done + 1, total)
    report("measure", total, total)
    return times


def table_from(times: Sequence[LengthTimes], device: str, model: str, dtype: str, vllm_version: str) -> PrefillTable:
    """The table of the measured times."""
    medians = [statistics.median(each.cold_s) for each in times]
    base_s, hit_s_per_token = fitted_line(
        [(each.cached_tokens, statistics.median(each.cached_s)) for each in times if each.cached_s]
    )
    return PrefillTable(
        device=device,
        model=model,
        dtype=dtype,
        vllm_version=vllm_version,
        date=datetime.now(UTC).date().isoformat(),
        tokens=tuple(each.num_tokens for each in times),
        seconds=tuple(round(float(seconds), 6) for seconds in np.maximum.accumulate(medians)),
        spread_s=tuple(round(max(each.cold_s) - min(each.cold_s), 6) for each in times),
        base_s=round(base_s, 6),
        hit_s_per_token=round(hit_s_per_token, 9),
    )


def fitted_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Least-squares (intercept, slope) of points (x, y), neither below 0; fewer than two different x give slope 0."""
    xs, ys = np.array(list(points), dtype=float).reshape(-1, 2).T
    if len(xs) == 0:
        return 0.0, 0.0
    mean_x, mean_y = float(xs.mean()), float(ys.mean())
    variance = float(((xs - mean_x) ** 2).sum())
    slope = float(((xs - mean_x) * (ys - mean_y)).sum()) / variance if variance > 0 else 0.0
    slope = max(slope, 0.0)
    return max(mean_y - slope * mean_x, 0.0), slope


def check_writable(path: Path, force: bool) -> None:
    """Raises ProfileError before minutes are spent, if the file exists (without `force`) or cannot be written."""
    directory = path.resolve().parent
    if path.is_dir():
        raise ProfileError(f"{path} is a directory; give --out the name of a file")
    if path.exists() and not force:
        raise ProfileError(f"{path} exists; give --force to replace it, or another --out")
    if not directory.is_dir():
        raise ProfileError(f"there is no directory {directory} to write {path.name} in")
    if not os.access(directory, os.W_OK):
        raise ProfileError(f"{directory} is not writable; give another --out")


def write_table(table: PrefillTable, path: Path) -> None:
    """Write the JSON file in one step: readers see the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("w") as file:
            file.write(table.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def measure_vllm(model: str, lengths: Sequence[int], repeats: int, limit_s: float, report: Report) -> PrefillTable:
    """Start vLLM on the device at hand, measure, stop it.

    Raises:
        ProfileError: vLLM could not start with this model, or see `measure`.
    """
    report("start", 0, 0)
    engine = VllmEngine(model, max(lengths) + BLOCK_TOKENS)
    report("start", 1, 1)
    try:
        times = measure(engine, lengths, repeats, limit_s, report)
    finally:
        engine.stop()
    return table_from(times, engine.device, Path(model).name, engine.dtype, engine.vllm_version)


class VllmEngine:
    """vLLM offline, prefix caching on, one token a prompt."""

    def __init__(self, model: str, max_model_len: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read by vLLM when it is imported, as the next one
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm  # takes ten seconds
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        self._sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        try:
            self._llm: Any = vllm.LLM(
                model=model,
                max_model_len=max_model_len,
                max_num_batched_tokens=STEP_TOKENS,
                enable_prefix_caching=True,
                use_tqdm_on_load=False,
                **({"enforce_eager": True, "block_size": BLOCK_TOKENS} if on_cpu else {}),
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ProfileError(f"vLLM could not start with {model}: {one_line(error)}") from error
        config = self._llm.llm_engine.model_config
        self.num_vocabulary: int = config.get_vocab_size()
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.vllm_version: str = vllm.__version__
        self.device: str = _cpu_name() if on_cpu else current_platform.get_device_name()

    def prefill(self, token_ids: Sequence[int]) -> int:
        """Compute the prompt and one token; how many prompt tokens were found cached."""
        prompt = {"prompt_token_ids": list(token_ids)}
        output = self._llm.generate([prompt], self._sampling, use_tqdm=False)[0]
        return output.num_cached_tokens or 0

    def stop(self) -> None:
        """End the engine's own process."""
        self._llm.llm_engine.engine_core.shutdown()


def one_line(error: Exception) -> str:
    """The error's text in one line, cut where it gets long; its type where it has no text."""
    # Not its first line: of a validation error that one says only how many there are.
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."


def _run_once(engine: Engine, times: LengthTimes, rng: random.Random) -> None:
    prompt = _random_prompt(rng, engine, times.num_tokens)
    seconds, _ = _timed_prefill(engine, prompt)
    times.cold_s.append(seconds)
    whole_blocks = times.num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    # One new token behind the cached blocks: a prompt that is cached to its end would compute its last block again.
    seconds, times.cached_tokens = _timed_prefill(engine, [*prompt[:whole_blocks], *_random_prompt(rng, engine, 1)])
    times.cached_s.append(seconds)


def _timed_prefill(engine: Engine, token_ids: Sequence[int]) -> tuple[float, int]:
    started_s = time.perf_counter()
    cached_tokens = engine.prefill(token_ids)
    return time.perf_counter() - started_s, cached_tokens


def _random_prompt(rng: random.Random, engine: Engine, num_tokens: int) -> list[int]:
    return [rng.randrange(engine.num_vocabulary) for _ in range(num_tokens)]


def _cpu_name() -> str:
    name = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} cores of {name}"
