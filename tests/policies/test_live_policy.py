"""The policy of a real engine changes while requests are in flight, without a restart and without another answer."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.policies.test_same_tokens import MODEL, PROJECT
from tests.policies.test_same_tokens import pytestmark as needs_the_model

pytestmark = needs_the_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one engine in processes of its own, which end with it, answered."""
    result = tmp_path_factory.mktemp("engine") / "found.json"
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Spinning OpenMP threads starve each other on a busy machine of two cores.
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(PROJECT),
    }
    command = [sys.executable, "-m", "tests.policies.run_live_engine", str(MODEL), str(result)]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
    read: dict[str, Any] = json.loads(result.read_text())
    return read


def values(stats: dict[str, Any], *names: str) -> list[Any]:
    return [stats["policy"][name] for name in names]


def test_changes_come_into_force_in_a_running_engine_and_are_read_back(found: dict[str, Any]) -> None:
    names = ("ordering", "eviction", "fast_weight", "protect_waiting", "patience_multiple")
    assert values(found["before"], *names) == ["fcfs", "lru", 4.0, None, None]
    assert [values(stats, *names) for stats in found["answers_to_changes"]] == [
        ["fcfs", "lru", 8.0, None, None],
        ["fcfs", "adaptive", 8.0, None, None],
        ["fcfs", "rlt", 8.0, True, None],
        ["fairway-carried", "rlt", 8.0, True, 3.0],
    ]
    assert found["after"]["policy"] == found["answers_to_changes"][-1]["policy"] == found["at_the_end"]["policy"]


def test_requests_waited_while_it_changed_and_none_is_left(found: dict[str, Any]) -> None:
    assert found["before"]["num_waiting"] == found["after_refusals"]["num_waiting"] == 4
    assert found["at_the_end"]["num_waiting"] == 0


def test_bad_changes_are_refused_with_field_value_and_bound_and_change_nothing(found: dict[str, Any]) -> None:
    fast_weight, ordering, seed = found["refusals"]
    assert "fast_weight=0.5: Input should be greater than or equal to 1" in fast_weight
    assert "ordering='sjf': Input should be 'fairway-carried'" in ordering
    assert "seed can't be changed in a running engine; ordering, eviction" in seed
    assert found["after_refusals"]["policy"] == found["after"]["policy"]


def test_order_is_the_new_one_from_then_on(found: dict[str, Any]) -> None:
    in_order_of_arrival = ["short a", "long 0", "hit 0 a", "hit 1 a", "hit 0 b"]
    assert found["unchanged"]["first_tokens"] == in_order_of_arrival
    assert found["changed"]["first_tokens"] == ["short a", "hit 0 a", "hit 1 a", "hit 0 b", "long 0"]


def test_every_answer_is_token_for_token_that_of_the_engine_before_anything_was_changed(found: dict[str, Any]) -> None:
    assert found["changed"]["answers"] == found["unchanged"]["answers"]
    assert len(found["unchanged"]["answers"]) == 7
    assert len({tuple(tokens) for tokens in found["unchanged"]["answers"].values()}) > 5
