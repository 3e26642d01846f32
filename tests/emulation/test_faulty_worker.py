"""Faults strike vLLM's own engine at their steps: most on a clock that only sleep moves."""

import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.emulation import worker
from serve_app.emulation.pseudo_text import expected_tokens
from serve_app.emulation.settings import EmulationSettings
from tests.emulation.conftest import MakeEngine
from tests.emulation.test_emulated_worker import FAST, add, prompt, run

ROOT = Path(__file__).parents[2]
STEP_S = 0.5
STEADY = {**FAST, "step_base_s": STEP_S}


class FakeClock:
    """Stands for the worker's `time`: only its sleeps pass."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(worker, "time", fake)
    return fake


def step_seconds(engine: Any, clock: FakeClock, num_tokens: int) -> tuple[list[float], list[int]]:
    """Run one request of a single prefill step; returns: seconds of each token's step, and the tokens."""
    add(engine, "one", prompt(40), max_tokens=num_tokens)
    seconds, tokens, before_s = [], [], clock.now_s
    while engine.has_unfinished_requests():
        for output in engine.step():
            seconds.append(clock.now_s - before_s)
            before_s, tokens = clock.now_s, list(output.outputs[0].token_ids)
    return seconds, tokens


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_slow_steps_take_factor_times_as_long_and_lose_no_token(
    make_engine: MakeEngine, clock: FakeClock, async_scheduling: bool
) -> None:
    fault = {"kind": "slow", "at_step": 3, "for_steps": 2, "factor": 3.0}
    engine = make_engine({**STEADY, "faults": [fault]}, async_scheduling)
    seconds, tokens = step_seconds(engine, clock, 6)
    assert seconds == pytest.approx([STEP_S, STEP_S, 3 * STEP_S, 3 * STEP_S, STEP_S, STEP_S])
    assert tokens == expected_tokens(EmulationSettings(), prompt(40), 6)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_hang_holds_its_step_back_and_ends(make_engine: MakeEngine, clock: FakeClock, async_scheduling: bool) -> None:
    fault = {"kind": "hang", "at_step": 2, "for_steps": 1, "hang_s": 900.0}
    engine = make_engine({**STEADY, "faults": [fault]}, async_scheduling)
    seconds, tokens = step_seconds(engine, clock, 4)
    assert seconds == pytest.approx([STEP_S, STEP_S + 900, STEP_S, STEP_S])
    assert tokens == expected_tokens(EmulationSettings(), prompt(40), 4)


def test_hang_without_an_end_holds_every_later_step_back(make_engine: MakeEngine, clock: FakeClock) -> None:
    engine = make_engine({**STEADY, "faults": [{"kind": "hang", "at_step": 3}]})
    seconds, _ = step_seconds(engine, clock, 5)
    assert seconds == pytest.approx([STEP_S, STEP_S, *[STEP_S + 600] * 3])


def test_hang_passes_on_the_wall_clock(make_engine: MakeEngine) -> None:
    engine = make_engine({**FAST, "faults": [{"kind": "hang", "at_step": 2, "for_steps": 1, "hang_s": 0.2}]})
    add(engine, "one", prompt(40), max_tokens=3)
    started_s = time.monotonic()
    engine.step()
    first_s = time.monotonic() - started_s
    while engine.has_unfinished_requests():
        engine.step()
    assert first_s < 0.2 <= time.monotonic() - started_s


def test_fault_is_logged_once_when_it_strikes(
    make_engine: MakeEngine, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine({**STEADY, "faults": [{"kind": "slow", "at_step": 2, "for_steps": 3, "factor": 2.0}]})
    step_seconds(engine, clock, 6)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (
        record.getMessage()
        == "EMULATED FAULT at engine step 2: SlowFault(kind='slow', at_step=2, for_steps=3, factor=2.0)"
    )


def test_crash_is_raised_at_its_step_and_at_every_later_one(make_engine: MakeEngine) -> None:
    # The warm-up of a served engine runs such a pair of requests: four steps.
    engine = make_engine({**FAST, "faults": [{"kind": "crash", "at_step": 5}]})
    for request_id in ("first", "second"):
        add(engine, request_id, prompt(8), max_tokens=2)
        while engine.has_unfinished_requests():
            engine.step()
    for request_id in ("third", "fourth"):
        add(engine, request_id, prompt(8))
        with pytest.raises(worker.EmulatedCrash, match=r"CUDA error.*at_step=5"):
            engine.step()


def test_crash_ends_the_engine_s_process_and_reaches_the_caller_as_vllm_s_engine_dead_error() -> None:
    command = (sys.executable, "-m", "tests.emulation.crash_an_engine")
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == "2 EngineDeadError\n", run.stderr[-2_000:]
    assert run.stderr.count("EMULATED GPU: no model runs") == 1
    assert run.stderr.count("EMULATED FAULT at engine step 3: CrashFault") == 1
    # The prefix that the served application sets labels vLLM's own lines as well.
    assert re.search(r"^(\(.*\) )?EMULATED INFO .*Initializing a V1 LLM engine", run.stderr, re.MULTILINE)


def test_no_torch_module_is_made_for_the_model(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{type(module)} was made")

    monkeypatch.setattr(torch.nn.Module, "__init__", refuse)
    engine = make_engine({**FAST, "kv_blocks": 601})
    add(engine, "one", prompt(100), max_tokens=2)
    assert len(run(engine)["one"][-1][1]) == 2
