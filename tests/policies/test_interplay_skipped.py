"""Requests that vLLM passes over or holds apart, under our order: LoRA, structured outputs and remote KV."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import LoRAConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from tests.policies.fake_connector import LoadingEngine, RemotePrefixes, kv_transfer_config
from tests.policies.scheduler_rig import ClockedScheduler, Engine, make_request, make_scheduler, prompt_of
from tests.policies.test_interplay import account, check_nothing_is_left, request_of, row


def lora_scheduler(directory: Path, **options: Any) -> AsyncScheduler:
    return make_scheduler(
        directory, ClockedScheduler, num_blocks=300, lora_config=LoRAConfig(max_lora_rank=8, max_loras=1), **options
    )


def test_requests_of_a_lora_that_may_not_run_are_skipped_and_come_back_in_order(tmp_path: Path) -> None:
    scheduler = lora_scheduler(tmp_path, fairway={"ordering": "fcfs"})
    engine = Engine(scheduler)
    for arrival_s, (name, lora) in enumerate(
        [("a0", 1), ("b1", 2), ("a1", 1), ("b2", 2), ("plain", None), ("c1", 3), ("a2", 1)]
    ):
        scheduler.add_request(request_of(name, prompt_of(engine.rng, 30), arrival_s, lora=lora, max_tokens=12))
    engine.step()
    assert engine.started == ["a0", "a1", "plain", "a2"]
    for _ in range(3):
        engine.step()
        # Passed over, and in the order of their arrival again.
        scheduler._take_back_ready_requests()
        scheduler._sync()
        scheduler._reorder_waiting()
        assert [request.request_id for request in scheduler.waiting] == ["b1", "b2", "c1"]
    engine.run_until_idle()
    assert engine.started == ["a0", "a1", "plain", "a2", "b1", "b2", "c1"]
    assert scheduler.num_left_to_vllm == 0
    check_nothing_is_left(engine)


def test_account_of_a_skipped_request_goes_on_while_the_engine_is_full(tmp_path: Path) -> None:
    scheduler = lora_scheduler(tmp_path, max_num_seqs=2)
    engine = Engine(scheduler)
    scheduler.add_request(request_of("a0", prompt_of(engine.rng, 30), 0.0, lora=1, max_tokens=60))
    scheduler.add_request(request_of("b0", prompt_of(engine.rng, 500), 1.0, lora=2, max_tokens=1))
    engine.step()
    number, allowance, overtaken = account(scheduler, "b0")
    for turn in range(4):
        scheduler.add_request(request_of(f"a{turn + 1}", prompt_of(engine.rng, 60), 2.0 + turn, lora=1, max_tokens=3))
        for _ in range(4):
            engine.step()
            found = account(scheduler, "b0")
            assert found[:2] == (number, allowance)
            assert found[2] >= overtaken
            overtaken = found[2]
    assert overtaken == 4 * 60
    engine.run_until_idle()
    check_nothing_is_left(engine)


class AnyText(StructuredOutputGrammar):  # type: ignore[misc]  # vLLM is untyped here
    """A grammar that accepts everything."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """Nothing to undo."""

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Everything is allowed."""

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        """Nothing to undo."""


def test_grammar_that_is_not_ready_is_left_to_vllm_and_counted_once_and_a_ready_one_takes_its_place(
    tmp_path: Path,
) -> None:
    scheduler = make_scheduler(tmp_path, ClockedScheduler, {"ordering": "fcfs"}, max_num_seqs=2, num_blocks=200)
    engine = Engine(scheduler)
    as_json = StructuredOutputsParams(json_object=True)
    constrained = {
        name: request_of(name, prompt_of(engine.rng, 30), arrival_s, structured_outputs=as_json)
        for name, arrival_s in (("ready", 1.0), ("late", 2.0))
    }
    constrained["ready"].structured_output_request.grammar = AnyText()
    for request in constrained.values():
        scheduler.add_request(request)
    for name, arrival_s, max_tokens in (("first", 0.0, 60), ("third", 3.0, 4), ("fourth", 4.0, 4)):
        prompt = prompt_of(engine.rng, 30)
        scheduler.add_request(make_request(name, prompt, arrival_s=arrival_s, max_tokens=max_tokens))
    while "third" not in engine.started:
        engine.step()
    assert engine.started == ["first", "ready", "third"]
    assert [request.request_id for request in scheduler.skipped_waiting] == ["late"]
    assert scheduler.num_left_to_vllm == 1
    assert "late" not in scheduler._requests.table.row_of
    # Two run: nobody may start, and the one that becomes ready is older than the one that waits.
    constrained["late"].structured_output_request.grammar = AnyText()
    engine.run_until_idle()
    assert engine.started == ["first", "ready", "third", "late", "fourth"]
    assert scheduler.num_left_to_vllm == 1
    assert engine.finished == {"first", "ready", "third", "late", "fourth"}
    check_nothing_is_left(engine)


def test_remote_kv_stays_in_vllms_queue_is_counted_and_comes_back_with_exactly_what_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemotePrefixes, "remote_tokens", {"remote": 168})
    scheduler = make_scheduler(tmp_path, ClockedScheduler, num_blocks=41, kv_transfer_config=kv_transfer_config())
    engine = LoadingEngine(scheduler)
    scheduler.add_request(make_request("remote", prompt_of(engine.rng, 200), arrival_s=1.0))
    engine.step()
    remote = scheduler.requests["remote"]
    assert remote.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    # It takes what is left of the blocks and runs on.
    scheduler.add_request(make_request("takes all", prompt_of(engine.rng, 440), arrival_s=2.0, max_tokens=9))
    for _ in range(5):
        engine.step()
        assert list(scheduler.skipped_waiting) == [remote]
        assert "remote" not in scheduler._requests.table.row_of
    assert scheduler.num_left_to_vllm == 1
    for name, arrival_s in (("earlier", 0.5), ("later", 3.0)):
        scheduler.add_request(make_request(name, prompt_of(engine.rng, 200), arrival_s=arrival_s))
    engine.loaded = {"remote"}
    for _ in range(2):  # reported with one step, promoted by vLLM in the next, where it finds no block
        engine.step()
    assert remote.status == RequestStatus.WAITING
    engine.step()
    assert not scheduler.skipped_waiting
    # Not the ten whole blocks that a look-up would find.
    table = scheduler._requests.table
    assert table.hit_tokens[row(scheduler, "remote")] == remote.num_computed_tokens == 168
    assert table.all_tokens[row(scheduler, "remote")] == 200
    # What is left of it is the least, so it goes before the one that came earlier.
    assert [request.request_id for request in scheduler.waiting] == ["remote", "earlier", "later"]
    new: dict[str, int] = {}
    while scheduler.has_unfinished_requests():
        new |= {one.req_id: one.num_computed_tokens for one in engine.step().scheduled_new_reqs}
    assert list(new.items()) == [("remote", 168), ("earlier", 0), ("later", 0)]
    assert scheduler.num_left_to_vllm == 1
    engine.run_until_idle()
    check_nothing_is_left(engine)


def test_remote_kv_that_is_aborted_while_it_loads_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemotePrefixes, "remote_tokens", {"remote": 160})
    scheduler = make_scheduler(tmp_path, ClockedScheduler, num_blocks=41, kv_transfer_config=kv_transfer_config())
    engine = LoadingEngine(scheduler)
    scheduler.add_request(make_request("remote", prompt_of(engine.rng, 200), arrival_s=1.0))
    scheduler.add_request(make_request("other", prompt_of(engine.rng, 200), arrival_s=2.0))
    engine.step()
    scheduler.finish_requests("remote", RequestStatus.FINISHED_ABORTED)
    engine.step()
    engine.loaded = {"remote"}  # only now may its blocks be used again
    engine.run_until_idle()
    check_nothing_is_left(engine)
