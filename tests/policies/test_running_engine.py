"""What fairway-carried does beside ordering, in vLLM's real scheduler: prefill share, head of line, live parameters."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from serve_app.policies.vllm_hooks import live
from tests.policies.scheduler_rig import (
    BLOCK_SIZE,
    ClockedScheduler,
    Engine,
    check_scheduler,
    make_request,
    make_scheduler,
    prompt_of,
)
from tests.policies.test_vllm_hooks import sliding_window


def steps_to_first_token(directory: Path, fairway: dict[str, Any]) -> dict[str, int]:
    """One prompt of 40 steps runs, and a short one comes every other step; name -> steps until its first token."""
    scheduler = make_scheduler(
        directory, ClockedScheduler, fairway, num_blocks=1_000, max_num_batched_tokens=128, max_model_len=8_192
    )
    engine, rng = Engine(scheduler), random.Random(1)
    came: dict[str, int] = {}
    took: dict[str, int] = {}
    for step in range(200):
        name = "long" if step == 0 else f"short{step}"
        if step == 0 or (step % 2 and step < 40):
            prompt = prompt_of(rng, 5_120 if name == "long" else 24)
            scheduler.add_request(make_request(name, prompt, arrival_s=step / 10, max_tokens=1))
            came[name] = step
        scheduler.now_s = step / 10
        engine.step()
        took |= {name: step - came[name] + 1 for name in engine.finished - set(took)}
    assert set(took) == set(came)
    return took


def test_short_prompts_pass_a_running_prefill_at_a_price_that_its_account_bounds(tmp_path: Path) -> None:
    off = steps_to_first_token(tmp_path, {"long_prefill_share": 1.0})
    on = steps_to_first_token(tmp_path, {"long_prefill_share": 0.5})
    assert off.pop("long") == 40
    # 20 short ones of 24 tokens are under four steps' budget; it may be passed by a quarter of its own 40.
    assert on.pop("long") == 44
    assert min(off.values()) > 2
    assert max(on.values()) == 1


def test_running_prefill_that_is_due_is_held_no_longer(tmp_path: Path) -> None:
    scheduler = make_scheduler(
        tmp_path, ClockedScheduler, num_blocks=1_000, max_num_batched_tokens=128, max_model_len=8_192
    )
    engine, rng = Engine(scheduler), random.Random(2)
    scheduler.add_request(make_request("long", prompt_of(rng, 1_280), arrival_s=0.0, max_tokens=1))
    passed_tokens = 0
    for step in range(100):
        for number in range(2):
            request = make_request(f"s{step}/{number}", prompt_of(rng, 30), arrival_s=1 + step, max_tokens=1)
            scheduler.add_request(request)
        scheduler.now_s = 1.0 + step
        output = engine.step()
        if "long" in engine.finished:
            break
        passed_tokens += sum(tokens for name, tokens in output.num_scheduled_tokens.items() if name != "long")
    assert "long" in engine.finished
    # The longest wait when it came was that of the two that came with it; one step may go over the line.
    assert 200 < passed_tokens <= 1.25 * (1_280 + 60) - 1_280 + 60


def test_published_orderings_hold_no_running_prefill(tmp_path: Path) -> None:
    published = steps_to_first_token(tmp_path, {"ordering": "fairway"})
    assert published["long"] == 40


@pytest.mark.parametrize(("ordering", "passes"), [("fairway-carried", True), ("fairway", False)])
def test_small_requests_pass_one_that_does_not_fit_until_it_is_due(ordering: str, passes: bool, tmp_path: Path) -> None:
    scheduler = make_scheduler(
        tmp_path,
        ClockedScheduler,
        {"ordering": ordering, "eviction": "lru", "protect_waiting": False},
        num_blocks=70,
        max_num_batched_tokens=256,
    )
    engine, rng = Engine(scheduler), random.Random(3)
    scheduler.add_request(make_request("runs", prompt_of(rng, 400), arrival_s=0.0, max_tokens=150))
    engine.step()
    # 50 blocks, of which some 40 are free while the first one runs.
    scheduler.add_request(make_request("big", prompt_of(rng, 800), arrival_s=1.0, max_tokens=1))
    scheduler.now_s = 1.0
    engine.step()
    big_started = None
    small_before = 0
    for step in range(400):
        scheduler.add_request(make_request(f"small{step}", prompt_of(rng, 60), arrival_s=2.0 + step, max_tokens=8))
        scheduler.now_s = 2.0 + step
        before = len(engine.started)
        engine.step()
        started = engine.started[before:]
        alive = set(scheduler.requests)
        check_scheduler(engine, alive)
        if "big" in started:
            big_started = step
            break
        small_before += sum(name.startswith("small") for name in started)
    assert big_started is not None
    assert (small_before > 0) == passes
    if passes:
        # (1 + 1/4) x its own 800 and what was left of the other may be run before it: then nothing passes.
        assert 60 * small_before <= 1_024


def test_engine_without_work_for_a_step_neither_spins_nor_loses_the_request(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, num_blocks=40, max_num_seqs=4)
    engine, rng = Engine(scheduler), random.Random(4)
    scheduler.add_request(make_request("first", prompt_of(rng, 500), arrival_s=0.0, max_tokens=60))
    scheduler.add_request(make_request("second", prompt_of(rng, 500), arrival_s=0.1, max_tokens=1))
    for _ in range(200):
        engine.step()
    assert engine.finished == {"first", "second"}


def test_policy_changes_at_the_next_step_of_a_running_engine(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {"ordering": "fcfs", "eviction": "lru"}, max_num_seqs=1)
    engine, rng = Engine(scheduler), random.Random(5)
    excerpt = prompt_of(rng, 320)
    scheduler.add_request(make_request("warm", excerpt, arrival_s=0.0, max_tokens=1))
    engine.run_until_idle()
    for name, prompt in (("a", prompt_of(rng, 200)), ("b", prompt_of(rng, 200)), ("hit", [*excerpt, 1])):
        scheduler.add_request(make_request(name, prompt, arrival_s=1.0, max_tokens=1))
    scheduler.now_s = 1.0
    engine.step()
    changes = {"ordering": "fairway-carried", "eviction": "rlt", "fast_weight": 8.0, "protect_waiting": True}
    stats = scheduler.change_policy(changes).model_dump()
    assert {name: stats[name] for name in changes} == changes
    engine.run_until_idle()
    assert engine.started[1:] == ["a", "hit", "b"]
    found = scheduler.policy_stats()
    assert found["policy"]["ordering"] == "fairway-carried"
    assert found["num_waiting"] == found["num_due"] == found["waiting_todo_tokens"] == 0
    check_scheduler(engine, set())


def test_eviction_changes_under_load_and_every_block_stays_owned_once(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {"eviction": "lru"}, num_blocks=60)
    engine, rng = Engine(scheduler, 2), random.Random(6)
    prefixes = [prompt_of(rng, 200) for _ in range(4)]
    for number in range(120):
        prompt = rng.choice(prefixes)[: rng.randint(0, 200)] + prompt_of(rng, rng.choice([1, 60]))
        scheduler.add_request(make_request(f"r{number}", prompt, arrival_s=number, max_tokens=rng.choice([1, 20])))
        scheduler.now_s = float(number)
        if number % 10 == 9:
            eviction = rng.choice(["lru", "rlt", "adaptive"])
            scheduler.change_policy({"eviction": eviction, "protect_waiting": rng.random() < 0.5})
        engine.step()
        check_scheduler(engine, {f"r{n}" for n in range(number + 1)} - engine.finished)
        scheduler.kv_cache_manager.block_pool.free_block_queue.free.check_integrity()
    engine.run_until_idle()
    assert len(engine.finished) == 120


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fast_weight": 0.0}, r"fast_weight=0\.0: .*greater than or equal to 1"),
        ({"ordering": "sjf"}, "ordering='sjf': Input should be"),
        ({"seed": 3}, "seed can't be changed in a running engine; ordering, eviction, .* can"),
        ({"long_prefill_share": 1.5}, r"long_prefill_share=1\.5: .*less than or equal to 1"),
    ],
)
def test_bad_change_is_refused_with_name_value_and_bound_and_changes_nothing(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler)
    before = scheduler.engine_policy
    with pytest.raises(ValueError, match=message):
        scheduler.change_policy(changes)
    assert scheduler.engine_policy is before


def test_change_that_the_model_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {"eviction": "lru"}, specs=[sliding_window()])
    assert scheduler.engine_policy.ordering == "fairway-carried"
    before = scheduler.engine_policy
    for changes in ({"eviction": "rlt"}, {"protect_waiting": True}):
        with pytest.raises(ValueError, match="needs one KV cache group, of full attention"):
            scheduler.change_policy(changes)
    assert scheduler.engine_policy is before


def test_engine_core_finds_both_utilities_by_name(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler)

    class Core(EngineCore):  # type: ignore[misc]  # vLLM is untyped here
        def __init__(self) -> None:
            self.scheduler = scheduler

    core = Core()
    assert getattr(core, live.POLICY_STATS)()["policy"]["fast_weight"] == 4.0
    assert getattr(core, live.CHANGE_POLICY)({"fast_weight": 2.0})["policy"]["fast_weight"] == 2.0
    assert scheduler._order.params.fast_weight == 2.0


def test_warm_continuation_goes_first_among_cold_prompts_and_these_keep_their_bound(tmp_path: Path) -> None:
    scheduler = make_scheduler(
        tmp_path, ClockedScheduler, num_blocks=1_000, max_num_batched_tokens=128, max_model_len=8_192, max_num_seqs=2
    )
    engine, rng = Engine(scheduler), random.Random(7)
    session = prompt_of(rng, 6_000)
    scheduler.add_request(make_request("session", session, arrival_s=0.0, max_tokens=1))
    engine.run_until_idle()
    for number in range(6):
        scheduler.add_request(make_request(f"cold{number}", prompt_of(rng, 640), arrival_s=1.0, max_tokens=1))
    turns = 0
    for step in range(60):
        if step % 3 == 0:
            prompt = [*session, *prompt_of(rng, BLOCK_SIZE)]
            scheduler.add_request(make_request(f"turn{step}", prompt, arrival_s=1.0 + step / 100, max_tokens=1))
            turns += 1
        scheduler.now_s = 1.0 + step / 100
        engine.step()
    assert engine.started[1] == "turn0"
    assert {f"cold{number}" for number in range(6)} <= engine.finished
    assert sum(name.startswith("turn") for name in engine.finished) == turns
