"""vLLM's own engine on the emulated GPU: what it samples, when, and how long it takes."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.emulation.pseudo_text import expected_tokens
from serve_app.emulation.settings import EmulationSettings

MakeEngine = Callable[..., Any]

FAST = {"step_base_s": 0.0, "s_per_token": 0.0, "kv_blocks": 600}


def prompt(num_tokens: int, first: int = 5) -> list[int]:
    return [(first + 7 * position) % 30_000 for position in range(num_tokens)]


def add(engine: Any, request_id: str, token_ids: list[int], max_tokens: int = 4) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, detokenize=False, ignore_eos=True)
    engine.add_request(request_id, {"prompt_token_ids": token_ids}, params)


def run(engine: Any) -> dict[str, list[tuple[float, list[int]]]]:
    """Step until idle. Returns: for each request, (wall seconds since the start, all tokens so far) of each output."""
    seen: dict[str, list[tuple[float, list[int]]]] = {}
    started_s = time.monotonic()
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            seen.setdefault(output.request_id, []).append((time.monotonic() - started_s, tokens))
    return seen


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_request_gets_its_expected_tokens(make_engine: MakeEngine, async_scheduling: bool) -> None:
    engine = make_engine(FAST, async_scheduling)
    prompts = {str(index): prompt(20 + 50 * index, first=index) for index in range(12)}
    for request_id, token_ids in prompts.items():
        add(engine, request_id, token_ids, max_tokens=5 + int(request_id))
    answers = {request_id: outputs[-1][1] for request_id, outputs in run(engine).items()}
    assert answers == {
        request_id: expected_tokens(EmulationSettings(), token_ids, 5 + int(request_id))
        for request_id, token_ids in prompts.items()
    }


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_request_continues_its_text(make_engine: MakeEngine, async_scheduling: bool) -> None:
    # 32 blocks of 16 tokens hold both prompts but not both answers.
    engine = make_engine({**FAST, "kv_blocks": 33}, async_scheduling, max_model_len=512)
    scheduler = engine.engine_core.engine_core.scheduler
    prompts = {"first": prompt(160, 1), "second": prompt(160, 2)}
    for request_id, token_ids in prompts.items():
        add(engine, request_id, token_ids, max_tokens=200)
    preemptions = 0
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        preemptions = max([preemptions, *(request.num_preemptions for request in scheduler.requests.values())])
    assert preemptions > 0
    assert answers == {key: expected_tokens(EmulationSettings(), ids, 200) for key, ids in prompts.items()}


def test_unfinished_prefill_chunk_samples_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(FAST)
    add(engine, "long", prompt(200, 777), max_tokens=2)
    tokens_after_step = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        tokens_after_step.append(len(outputs[0].outputs[0].token_ids) if outputs else 0)
    # 200 tokens are four chunks of at most 64; the fourth ends the prompt.
    assert tokens_after_step == [0, 0, 0, 1, 2]


def test_steps_last_as_long_as_the_model_says(make_engine: MakeEngine) -> None:
    settings = {"step_base_s": 0.02, "s_per_token": 1e-4, "kv_blocks": 600, "time_scale": 2.0}
    engine = make_engine(settings, max_num_batched_tokens=512)
    add(engine, "cold", prompt(1_024), max_tokens=3)
    times_s = [at_s for at_s, _ in run(engine)["cold"]]
    # Two chunks of 2 * (20 + 51.2) ms, then decodes of 2 * (20 + 0.1) ms; the engine's own work comes on top.
    expected_s = [0.2848, 0.325, 0.3652]
    assert all(expected <= measured for expected, measured in zip(expected_s, times_s, strict=True))
    assert times_s[-1] < 1.5 * expected_s[-1]


def test_prefix_hit_shortens_the_time_to_first_token(make_engine: MakeEngine) -> None:
    engine = make_engine({**FAST, "s_per_token": 1e-4}, max_num_batched_tokens=2_048)
    add(engine, "cold", prompt(1_600), max_tokens=1)
    cold_s = run(engine)["cold"][0][0]
    add(engine, "warm", prompt(1_600), max_tokens=1)
    warm_s = run(engine)["warm"][0][0]
    assert cold_s >= 0.16
    assert warm_s < cold_s / 4


def test_async_scheduling_hides_the_hosts_work_behind_the_step(make_engine: MakeEngine) -> None:
    engine = make_engine({**FAST, "step_base_s": 0.02}, async_scheduling=True)
    add(engine, "one", prompt(16), max_tokens=10)
    steps = []
    while engine.has_unfinished_requests():
        begun_s = time.monotonic()
        engine.step()
        steps.append(time.monotonic() - begun_s)
    # Two steps are in flight, so at least one call returns at once and the sum is still that of ten steps.
    assert min(steps) < 0.01
    assert sum(steps) >= 0.2


def test_pool_has_the_blocks_that_were_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine({"kv_blocks": 321})
    assert engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 321


def test_finished_and_aborted_requests_are_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine(FAST)
    for index in range(4):
        add(engine, str(index), prompt(40, 900 + index), max_tokens=50)
    engine.step()
    engine.abort_request(["0", "1"])
    run(engine)
    engine.engine_core.engine_core.step()
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    assert worker._forward_model.num_requests == 0


def test_max_model_len_beyond_the_pool_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match=r"max_model_len|max seq len|KV cache"):
        make_engine({**FAST, "kv_blocks": 20}, max_model_len=4_096)


def test_pseudo_text_beyond_the_vocabulary_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="vocabulary of 32000"):
        make_engine({"text_first_id": 31_000, "text_num_ids": 2_000})


def test_bad_emulation_setting_is_named_with_value_and_bound() -> None:
    with pytest.raises(ValueError, match=r"time_scale=0.*greater than 0"):
        EmulationSettings.from_section({"emulation": {"time_scale": 0}}, "emulation")
    assert EmulationSettings.from_section(None, "emulation") == EmulationSettings()
