"""A replica reads and changes its engine's policy through vLLM's utilities, and says in one line what is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.core import EngineCoreProc

from serve_app.config import EnginePolicy
from serve_app.deployments.worker import FairwayServer
from serve_app.policies import live_names


class Core:
    """An engine core with a policy and no model, whose answers are made as vLLM makes them."""

    def __init__(self) -> None:
        self.policy = EnginePolicy()
        self.asked: list[tuple[Any, ...]] = []

    def change(self, changes: dict[str, Any]) -> dict[str, Any]:
        self.policy = self.policy.changed(changes)
        return self.stats()

    def stats(self) -> dict[str, Any]:
        return {"policy": self.policy.model_dump(mode="json", exclude={"prefill_profile"}), "num_waiting": 0}

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        self.asked.append((name, *args))
        utilities: dict[str, Callable[..., Any]] = {
            live_names.CHANGE_POLICY: self.change,
            live_names.POLICY_STATS: self.stats,
        }
        return made_by_vllm(name, lambda: utilities[name](*args))


class StockCore(Core):
    """The core of an engine with another scheduler."""

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        return made_by_vllm(name, lambda: getattr(self, name)(*args))


class DeadCore(Core):
    async def call_utility_async(self, name: str, *args: Any) -> Any:
        raise ConnectionError("the engine has died")


def made_by_vllm(name: str, get_result: Callable[[], Any]) -> Any:
    """The result as it comes to the caller, or the failure as the client raises it there."""
    output = UtilityOutput(1)
    EngineCoreProc._invoke_utility_method(name, get_result, output, lambda _: None)
    if output.failure_message is not None:
        raise Exception(output.failure_message)
    return output.result.result


class Server(FairwayServer):
    """A replica around that core. Ray's would start an engine, and its `__del__` is a coroutine that nobody awaits."""

    def __init__(self, core: Core) -> None:
        self.engine = SimpleNamespace(_engine_client=SimpleNamespace(engine_core=core))

    def __del__(self) -> None:
        """Nothing is open."""


async def test_change_is_sent_once_and_is_read_back() -> None:
    core = Core()
    server = Server(core)
    assert (await server.engine_policy())["policy"]["fast_weight"] == 4.0
    answer = await server.change_engine_policy({"fast_weight": 8.0, "ordering": "fcfs"})
    assert answer == await server.engine_policy()
    assert (answer["policy"]["fast_weight"], answer["policy"]["ordering"]) == (8.0, "fcfs")
    assert core.asked[1] == (live_names.CHANGE_POLICY, {"fast_weight": 8.0, "ordering": "fcfs"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fast_weight": 0.5}, r"fast_weight=0\.5: Input should be greater than or equal to 1$"),
        ({"seed": 1}, "^seed can't be changed in a running engine; ordering, eviction, .* can$"),
    ],
)
async def test_refused_change_is_a_value_error_in_one_line_with_field_value_and_bound(
    changes: dict[str, Any], message: str
) -> None:
    core = Core()
    with pytest.raises(ValueError, match=message) as refused:
        await Server(core).change_engine_policy(changes)
    assert "\n" not in str(refused.value)
    assert "Call to" not in str(refused.value)
    assert core.policy == EnginePolicy()


async def test_engine_with_another_scheduler_is_named_as_such() -> None:
    server = Server(StockCore())
    for ask in (server.engine_policy(), server.change_engine_policy({"fast_weight": 2.0})):
        with pytest.raises(RuntimeError, match="scheduler_cls is not FairwayScheduler"):
            await ask


async def test_error_of_the_engine_itself_comes_through_as_it_is() -> None:
    with pytest.raises(ConnectionError, match="the engine has died"):
        await Server(DeadCore()).engine_policy()
