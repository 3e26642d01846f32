"""What vLLM offers beside queue and cache, under our order: vLLM's real scheduler, one feature a test."""

import random
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request, RequestStatus

from tests.policies.scheduler_rig import (
    BLOCK_SIZE,
    ClockedScheduler,
    Engine,
    block_hasher,
    check_scheduler,
    full_attention,
    make_request,
    make_scheduler,
    prompt_of,
)
from tests.policies.test_vllm_hooks import sliding_window


def request_of(name: str, prompt: list[int], arrival_s: float, *, lora: int | None = None, **sampling: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**({"max_tokens": 4, "ignore_eos": True} | sampling)),
        pooling_params=None,
        arrival_time=arrival_s,
        lora_request=None if lora is None else LoRARequest(f"lora{lora}", lora, "nowhere"),
        block_hasher=block_hasher,
    )


def warm(engine: Engine, num_tokens: int) -> list[int]:
    """A prompt that is cached, in an idle engine."""
    excerpt = prompt_of(engine.rng, num_tokens)
    engine.scheduler.add_request(make_request("warm", excerpt, arrival_s=0.0, max_tokens=1))
    engine.run_until_idle()
    engine.started.clear()
    return excerpt


def row(scheduler: ClockedScheduler, name: str) -> int:
    return scheduler._requests.table.row_of[name]


def account(scheduler: ClockedScheduler, name: str) -> tuple[int, float, int]:
    """Number of admission, allowance, and what was run of later ones."""
    table, at = scheduler._requests.table, row(scheduler, name)
    return int(table.number[at]), float(table.allowance_tokens[at]), int(table.overtaken_tokens[at])


def check_nothing_is_left(engine: Engine) -> None:
    """Assert that an idle engine holds no row, no account, no pin and no watched prefix."""
    scheduler = engine.scheduler
    check_scheduler(engine, set())
    scheduler._sync()
    requests = scheduler._requests
    assert not requests.table.row_of
    assert not requests._prefilling
    assert not requests._preempted
    assert not requests._pinned
    assert not requests.prefixes._followed
    assert not requests.prefixes._watchers
    if scheduler._eviction is not None:
        assert not scheduler._eviction._pins


def test_higher_priority_goes_before_one_that_is_due_and_is_never_charged_to_it(tmp_path: Path) -> None:
    scheduler = make_scheduler(
        tmp_path, ClockedScheduler, {"fast_weight": 64.0}, policy="priority", max_num_seqs=1, num_blocks=400
    )
    engine = Engine(scheduler)
    excerpt = warm(engine, 320)

    def add(name: str, prompt: list[int], priority: int) -> None:
        scheduler.add_request(make_request(name, prompt, arrival_s=scheduler.now_s, max_tokens=1, priority=priority))

    add("runs", prompt_of(engine.rng, 300), 1)
    add("old", prompt_of(engine.rng, 600), 1)
    engine.step()
    num_hits = 0
    while not scheduler._order.is_due(scheduler._requests.table, [row(scheduler, "old")])[0]:
        scheduler.now_s += 0.001
        num_hits += 1
        add(f"hit{num_hits}", [*excerpt, *prompt_of(engine.rng, 40)], 1)
        engine.step()
    assert num_hits > 1
    before = account(scheduler, "old")
    add("urgent", prompt_of(engine.rng, 500), 0)
    add("last hit", [*excerpt, *prompt_of(engine.rng, 40)], 1)
    add("less urgent", prompt_of(engine.rng, 500), 2)
    while "urgent" not in engine.started:
        engine.step()
    charged = account(scheduler, "old")[2] - before[2]
    while "old" not in engine.started:
        # Only the hit that ran when `urgent` came was later than `old`; neither is `urgent` itself.
        assert account(scheduler, "old") == (*before[:2], before[2] + charged)
        engine.step()
    engine.run_until_idle()
    waited = [name for name in engine.started if not name.startswith("hit")]
    assert waited == ["runs", "urgent", "old", "last hit", "less urgent"]
    check_nothing_is_left(engine)


def test_running_prefill_of_a_lower_priority_is_charged_to_the_higher_one_that_waits(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, policy="priority", max_num_seqs=1, num_blocks=400)
    engine = Engine(scheduler)
    scheduler.add_request(make_request("low", prompt_of(engine.rng, 640), arrival_s=0.0, priority=1))
    engine.step()
    scheduler.add_request(make_request("high", prompt_of(engine.rng, 200), arrival_s=5.0, priority=0))
    scheduler.add_request(make_request("low later", prompt_of(engine.rng, 200), arrival_s=1.0, priority=1))
    for step in range(1, 4):
        engine.step()
        assert account(scheduler, "high")[2] == 128 * step
        assert account(scheduler, "low later")[2] == 0
    engine.run_until_idle()
    assert engine.started == ["low", "high", "low later"]
    check_nothing_is_left(engine)


def test_lower_priority_passes_no_higher_one_that_does_not_fit(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {}, policy="priority", num_blocks=60)
    engine = Engine(scheduler)
    scheduler.add_request(make_request("runs", prompt_of(engine.rng, 300), arrival_s=0.0, max_tokens=40))
    while scheduler.requests["runs"].num_output_tokens < 2:
        engine.step()
    scheduler.add_request(make_request("high big", prompt_of(engine.rng, 800), arrival_s=1.0, priority=0))
    scheduler.add_request(make_request("high small", prompt_of(engine.rng, 40), arrival_s=2.0, priority=0))
    scheduler.add_request(make_request("low small", prompt_of(engine.rng, 40), arrival_s=0.5, priority=1))
    engine.run_until_idle()
    assert engine.started == ["runs", "high small", "high big", "low small"]
    check_nothing_is_left(engine)


def test_lower_priority_takes_nothing_from_a_running_prefill_of_a_higher_one(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {}, policy="priority", num_blocks=200)
    engine = Engine(scheduler)
    scheduler.add_request(make_request("high", prompt_of(engine.rng, 900), arrival_s=0.0, priority=0))
    engine.step()
    scheduler.add_request(make_request("low", prompt_of(engine.rng, 20), arrival_s=1.0, priority=1))
    for _ in range(6):
        assert engine.step().num_scheduled_tokens == {"high": 128}
    engine.run_until_idle()
    check_nothing_is_left(engine)


def test_account_goes_on_when_a_prefill_is_preempted_in_the_middle(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, num_blocks=54, max_num_batched_tokens=64)
    engine = Engine(scheduler)
    for number in range(6):
        scheduler.add_request(make_request(f"decodes{number}", prompt_of(engine.rng, 60), arrival_s=0.0, max_tokens=90))
    while any(request.num_output_tokens < 2 for request in scheduler.requests.values()):
        engine.step()
    scheduler.add_request(make_request("long", prompt_of(engine.rng, 400), arrival_s=1.0))
    engine.step()
    scheduler.add_request(make_request("short", prompt_of(engine.rng, 6), arrival_s=2.0, max_tokens=1))
    accounts = []
    while scheduler.requests["long"].status == RequestStatus.RUNNING:
        accounts.append(account(scheduler, "long"))
        engine.step()
    assert scheduler.requests["long"].num_preemptions == 1
    assert scheduler.requests["long"].num_output_tokens == 0
    # `short` passed the running prefill, within its account.
    assert "short" in engine.finished
    assert accounts[-1][2] == 6
    scheduler.add_request(make_request("later", prompt_of(engine.rng, 400), arrival_s=3.0, max_tokens=1))
    scheduler._sync()
    assert account(scheduler, "long") == accounts[-1]
    assert row(scheduler, "long") in scheduler._requests.table.waiting_rows()
    scheduler._reorder_waiting()
    assert [request.request_id for request in scheduler.waiting] == ["long", "later"]
    engine.run_until_idle()
    assert {"long", "later"} <= engine.finished
    check_nothing_is_left(engine)


@pytest.mark.parametrize("eviction", ["lru", "rlt", "adaptive"])
def test_abort_while_waiting_leaves_no_row_no_account_and_no_pin(eviction: str, tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {"eviction": eviction}, max_num_seqs=1, num_blocks=200)
    engine = Engine(scheduler)
    excerpt = warm(engine, 320)
    scheduler.add_request(make_request("runs", prompt_of(engine.rng, 300), arrival_s=1.0, max_tokens=20))
    engine.step()
    hits = [f"hit{number}" for number in range(4)]
    for number, name in enumerate(hits):
        prompt = [*excerpt[: 80 * (number + 1)], *prompt_of(engine.rng, 20)]
        scheduler.add_request(make_request(name, prompt, arrival_s=2.0))
    engine.step()
    requests = scheduler._requests
    assert set(requests.table.row_of) == {"runs", *hits}
    assert len(requests._pinned) == len(scheduler._eviction._pins) == 4
    scheduler.finish_requests(hits[:3], RequestStatus.FINISHED_ABORTED)
    engine.step()
    requests.check_integrity(scheduler.waiting)
    assert set(requests.table.row_of) - {"runs"} == {"hit3"}
    assert list(requests._pinned) == [row(scheduler, "hit3")]
    assert len(scheduler._eviction._pins) == 1
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    check_nothing_is_left(engine)
    # A request of the same name is another one, with an account of its own.
    scheduler.add_request(make_request("hit3", prompt_of(engine.rng, 300), arrival_s=3.0))
    engine.run_until_idle()
    assert engine.finished == {"warm", "hit3"}
    check_nothing_is_left(engine)


def test_numbers_of_an_idle_engine_count_nobody(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, max_num_seqs=1)
    engine = Engine(scheduler)
    for number in range(3):
        scheduler.add_request(make_request(f"r{number}", prompt_of(engine.rng, 40), arrival_s=0.0, max_tokens=1))
    engine.step()
    assert scheduler.policy_stats()["num_waiting"] == 2
    engine.run_until_idle()
    assert scheduler.policy_stats()["num_waiting"] == 0
    assert scheduler.policy_stats()["waiting_todo_tokens"] == 0


def test_several_answers_to_one_prompt_arrive_at_once_have_consecutive_numbers_and_all_finish(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, max_num_seqs=1, num_blocks=200)
    engine = Engine(scheduler)
    scheduler.add_request(make_request("runs", prompt_of(engine.rng, 300), arrival_s=0.0))
    engine.step()
    scheduler.add_request(make_request("before", prompt_of(engine.rng, 100), arrival_s=1.0))
    params = SamplingParams(n=4, max_tokens=3, ignore_eos=True, seed=1)
    whole = EngineCoreRequest("n", prompt_of(engine.rng, 100), None, params, None, 2.0, None, None, None)
    whole.external_req_id = "n"
    parent = ParentRequest(whole)
    children = []
    for index in range(parent.n):  # as AsyncLLM does
        child = copy(whole)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        children.append(child.request_id)
        scheduler.add_request(Request.from_engine_core_request(child, block_hasher))
    scheduler.add_request(make_request("after", prompt_of(engine.rng, 100), arrival_s=3.0))
    engine.step()
    table, rows = scheduler._requests.table, [row(scheduler, name) for name in children]
    assert table.arrival_s[rows].tolist() == [2.0] * 4
    first = int(table.number[row(scheduler, "before")]) + 1
    assert table.number[rows].tolist() == list(range(first, first + 4))
    engine.run_until_idle()
    assert set(children) <= engine.finished
    assert engine.started == ["runs", "before", *children, "after"]
    check_nothing_is_left(engine)


def test_prompt_logprobs_read_no_cache_and_are_ordered_as_the_miss_that_they_are(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, max_num_seqs=1, num_blocks=300)
    engine = Engine(scheduler)
    excerpt = warm(engine, 320)
    scheduler.add_request(make_request("runs", prompt_of(engine.rng, 200), arrival_s=0.5))
    engine.step()
    scheduler.add_request(request_of("logprobs", [*excerpt, 1], 1.0, prompt_logprobs=1))
    scheduler.add_request(request_of("hit", [*excerpt, 2], 2.0))
    engine.step()
    table = scheduler._requests.table
    assert table.hit_tokens[row(scheduler, "logprobs")] == 0
    assert table.hit_tokens[row(scheduler, "hit")] == 320
    assert row(scheduler, "logprobs") not in scheduler._requests._pinned
    computed: dict[str, int] = {}
    while scheduler.has_unfinished_requests():
        computed |= {new.req_id: new.num_computed_tokens for new in engine.step().scheduled_new_reqs}
    assert list(computed.items()) == [("hit", 320), ("logprobs", 0)]
    check_nothing_is_left(engine)


@pytest.mark.parametrize("specs", [[sliding_window()], [full_attention(), sliding_window()]], ids=["window", "hybrid"])
@pytest.mark.parametrize("eviction", ["rlt", "adaptive"])
def test_model_without_one_group_of_full_attention_refuses_our_eviction_and_says_what_to_set(
    eviction: str, specs: list[KVCacheSpec], tmp_path: Path
) -> None:
    names = str([type(spec).__name__ for spec in specs]).replace("[", r"\[").replace("]", r"\]")
    message = rf"^eviction='{eviction}' needs one KV cache group, of full attention, not {names}; set it to 'lru'"
    with pytest.raises(ValueError, match=message):
        make_scheduler(tmp_path, ClockedScheduler, {"eviction": eviction}, specs=specs)


@pytest.mark.parametrize("specs", [[sliding_window()], [full_attention(), sliding_window()]], ids=["window", "hybrid"])
def test_model_without_one_group_of_full_attention_is_ordered_with_accounts_and_protects_nothing(
    specs: list[KVCacheSpec], tmp_path: Path
) -> None:
    scheduler = make_scheduler(
        tmp_path, ClockedScheduler, {"eviction": "lru"}, specs=specs, max_num_seqs=1, num_blocks=200
    )
    assert scheduler.engine_policy.is_carried
    assert scheduler._eviction is scheduler._requests._pins is None
    engine, rng = Engine(scheduler), random.Random(1)
    excerpt = prompt_of(rng, 320)
    scheduler.add_request(make_request("warm", excerpt, arrival_s=0.0, max_tokens=1))
    engine.run_until_idle()
    scheduler.add_request(make_request("runs", prompt_of(rng, 200), arrival_s=0.5))
    engine.step()
    scheduler.add_request(make_request("miss", prompt_of(rng, 600), arrival_s=1.0))
    scheduler.add_request(make_request("hit", [*excerpt, *prompt_of(rng, 20)], arrival_s=2.0))
    while "hit" not in engine.finished:
        engine.step()
    assert engine.started == ["warm", "runs", "hit"]
    assert account(scheduler, "miss")[2] == 20 + 320 % BLOCK_SIZE
    engine.run_until_idle()
    assert engine.started == ["warm", "runs", "hit", "miss"]
    scheduler._sync()
    assert not scheduler._requests.table.row_of


def test_pause_starts_nobody_and_the_queue_goes_on_in_order_with_its_accounts(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, max_num_seqs=2, num_blocks=300)
    engine = Engine(scheduler)
    excerpt = warm(engine, 320)
    scheduler.add_request(make_request("runs", prompt_of(engine.rng, 500), arrival_s=0.0, max_tokens=30))
    engine.step()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for name, arrival_s in (("miss", 1.0), ("aborted", 2.0)):
        scheduler.add_request(make_request(name, prompt_of(engine.rng, 300), arrival_s=arrival_s))
    scheduler.add_request(make_request("hit", [*excerpt, 1], arrival_s=3.0))
    assert [engine.step().num_scheduled_tokens["runs"] for _ in range(3)] == [128, 128, 500 - 3 * 128]
    before = account(scheduler, "miss")
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    for _ in range(3):
        assert not engine.step().num_scheduled_tokens
    assert account(scheduler, "miss") == before
    scheduler._requests.check_integrity(scheduler.waiting)
    assert engine.started == ["runs"]
    scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run_until_idle()
    assert engine.started == ["runs", "hit", "miss"]
    check_nothing_is_left(engine)
