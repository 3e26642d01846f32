"""The engine's figures in the process in front of it: counts with every step, the queue asked for while it waits."""

import asyncio
import json
import pickle
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from serve_app.deployments.event_forwarder import EngineLoad
from serve_app.deployments.worker import follow_counts
from serve_app.router.lifecycle import EngineReport, LifecycleBatch
from tests.deployments.run_engine_load import NUM_PROMPTS, PROMPT_TOKENS, RUNNING_AT_ONCE

ROOT = Path(__file__).parents[2]


class Engine:
    """Answers with `queued_tokens` when `gate` is open, counts how often it was asked, and owns the clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.queued_tokens = 0
        self.num_asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def ask(self) -> int:
        self.num_asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.queued_tokens

    def load(self) -> EngineLoad:
        return EngineLoad(self.ask, ask_every_s=0.25, clock=lambda: self.now_s)


@pytest.fixture
def engine() -> Engine:
    return Engine()


async def _answered() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_nothing_is_reported_before_the_first_step(engine: Engine) -> None:
    assert engine.load().report(is_idle=True) is None


async def test_engine_with_an_empty_queue_is_not_asked(engine: Engine) -> None:
    load = engine.load()
    for _ in range(5):
        load.counted(running=3, waiting=0)
        engine.now_s += 1.0
    await _answered()
    assert engine.num_asked == 0
    assert load.report(is_idle=False) == EngineReport(0, running=3, waiting=0, at_s=1.0)


async def test_queue_is_asked_for_at_most_once_a_period(engine: Engine) -> None:
    load, engine.queued_tokens = engine.load(), 700
    for _ in range(10):
        load.counted(running=1, waiting=2)
        await _answered()
        engine.now_s += 0.1
    assert engine.num_asked == 4  # at 0, 0.3, 0.6 and 0.9 s: at the first step after each quarter of a second
    report = load.report(is_idle=False)
    assert report is not None
    assert (report.queued_tokens, report.running, report.waiting) == (700, 1, 2)
    assert report.at_s == pytest.approx(0.1)


async def test_age_is_that_of_the_oldest_figure(engine: Engine) -> None:
    load = engine.load()
    load.counted(running=1, waiting=2)
    await _answered()
    engine.gate.clear()
    engine.now_s += 2.0
    load.counted(running=1, waiting=2)
    await _answered()
    report = load.report(is_idle=False)
    assert report is not None
    assert report.at_s == 2.0
    engine.gate.set()
    await _answered()
    report = load.report(is_idle=False)
    assert report is not None
    assert report.at_s == 0.0


async def test_answer_that_comes_after_the_queue_emptied_is_not_believed(engine: Engine) -> None:
    load, engine.queued_tokens = engine.load(), 700
    engine.gate.clear()
    load.counted(running=1, waiting=2)
    await _answered()
    load.counted(running=3, waiting=0)
    engine.gate.set()
    await _answered()
    assert load.report(is_idle=False) == EngineReport(0, running=3, waiting=0, at_s=0.0)


async def test_idle_engine_s_zeros_do_not_age(engine: Engine) -> None:
    load = engine.load()
    load.counted(running=0, waiting=0)
    engine.now_s += 60.0
    assert load.report(is_idle=True) == EngineReport(0, 0, 0, at_s=0.0)
    assert load.report(is_idle=False) == EngineReport(0, 0, 0, at_s=60.0)


async def test_scheduler_that_can_not_be_asked_reports_nothing_and_is_asked_once(engine: Engine) -> None:
    load, engine.error = engine.load(), RuntimeError("the engine has no policy of ours")
    for _ in range(3):
        load.counted(running=1, waiting=2)
        await _answered()
        engine.now_s += 1.0
    assert engine.num_asked == 1
    assert load.report(is_idle=False) is None


def _manager(*loggers: Any) -> StatLoggerManager:
    manager: StatLoggerManager = StatLoggerManager.__new__(StatLoggerManager)
    manager.stat_loggers = list(loggers)
    return manager


async def test_vllm_s_own_manager_passes_every_step_s_counts_on(engine: Engine) -> None:
    load, client = engine.load(), SimpleNamespace(logger_manager=_manager())
    follow_counts(client, load)
    stats = SchedulerStats(num_running_reqs=4, num_waiting_reqs=0, num_skipped_waiting_reqs=0)
    client.logger_manager.record(scheduler_stats=stats, iteration_stats=None, mm_cache_stats=None, engine_idx=0)
    client.logger_manager.record(scheduler_stats=None, iteration_stats=None)
    client.logger_manager.log()
    assert load.report(is_idle=False) == EngineReport(0, running=4, waiting=0, at_s=0.0)


async def test_requests_that_wait_for_something_else_than_their_turn_count_as_waiting(engine: Engine) -> None:
    load, client = engine.load(), SimpleNamespace(logger_manager=_manager())
    follow_counts(client, load)
    stats = SchedulerStats(num_running_reqs=0, num_waiting_reqs=2, num_skipped_waiting_reqs=1)
    client.logger_manager.record(scheduler_stats=stats, iteration_stats=None)
    await _answered()
    report = load.report(is_idle=False)
    assert report is not None
    assert report.waiting == 3


async def test_engine_without_statistics_is_left_alone(engine: Engine) -> None:
    follow_counts(SimpleNamespace(logger_manager=None), engine.load())
    assert engine.num_asked == 0


def test_vllm_s_client_keeps_its_loggers_where_ours_joins_them() -> None:
    assert {"logger_manager", "log_stats"} <= set(AsyncLLM.__init__.__code__.co_names)
    assert "stat_loggers" in StatLoggerManager.__init__.__code__.co_names
    assert "_logger_ref" in AsyncLLM._run_output_handler.__code__.co_names


def test_figures_survive_pickling_in_their_batch() -> None:
    batch = LifecycleBatch("a", "a-1", 7, (), report=EngineReport(2_048, running=3, waiting=1, at_s=0.2))
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert LifecycleBatch("a", "a-1", 8, ()).report is None


def test_running_engine_s_figures_are_fresh_and_right_and_end_at_zero(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = (sys.executable, "-m", "tests.deployments.run_engine_load", str(result))
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2_000:]
    found = json.loads(result.read_text())
    busy = found["busy"]
    assert median(report["at_s"] for report in busy) < 0.5
    assert max(report["running"] for report in busy) == RUNNING_AT_ONCE
    full = [report for report in busy if report["waiting"] == NUM_PROMPTS - RUNNING_AT_ONCE]
    assert max(report["queued_tokens"] for report in full) == (NUM_PROMPTS - RUNNING_AT_ONCE) * PROMPT_TOKENS
    assert found["num_asked"] <= found["busy_s"] / 0.25 + 1
    # All their prompts are cached by then but for the block that holds the last token.
    assert 0 < found["before_the_abort"][-1]["queued_tokens"] < (NUM_PROMPTS - RUNNING_AT_ONCE) * 16
    empty = {"queued_tokens": 0, "running": 0, "waiting": 0, "at_s": 0.0}
    assert found["after_the_last"] == found["after_the_abort"] == empty
