"""The admin application's rules, against ingress replicas that can be away."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException

from serve_app.config import RouterSettings, RoutingDocument, RoutingWeights
from serve_app.deployments.control import FairwayControl
from serve_app.deployments.weights_store import WeightsStore
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.routing_state import RouteRequest, RoutingState

TOKEN = "a-token-long-enough"
BEARER = f"Bearer {TOKEN}"


class Ingresses:
    """A handle on real routing states, without Serve between."""

    def __init__(self, *versions: int) -> None:
        self.states = [_state(version) for version in versions]
        self.away = False

    def broadcast(self, method: str, *args: Any) -> "Answers":
        if self.away:
            raise ConnectionError("nobody there")
        if method == "state":
            return Answers([state.snapshot(0.0) for state in self.states])
        if method == "explain":
            records = [state.decisions.get(*args) for state in self.states]
            return Answers([record and record.as_row() for record in records])
        assert method == "apply_routing"
        return Answers([state.apply(*args) for state in self.states])


class Answers:
    def __init__(self, values: list[Any]) -> None:
        self._values = values

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        return self._values


def _state(version: int) -> RoutingState:
    settings = RouterSettings(routing=RoutingDocument(version=version, weights=RoutingWeights(queue=float(version))))
    return RoutingState(settings, PrefillProfile.flat(), None)


def _control(path: Path, ingresses: Ingresses) -> Any:
    # The class as written: `serve.ingress` puts one around it that only Serve can take down.
    written: Any = FairwayControl.__mro__[1]
    control = written.__new__(written)
    control._store, control._token = WeightsStore(path / "weights.sqlite3"), TOKEN
    control._ingress, control._document = ingresses, control._store.latest()
    return control


async def test_change_is_saved_and_followed_by_every_ingress(tmp_path: Path) -> None:
    ingresses = Ingresses(1, 1)
    control = _control(tmp_path, ingresses)
    saved = await control.put_weights(RoutingDocument(version=1, router="round-robin"), BEARER)
    assert (saved.version, saved.router) == (2, "round-robin")
    assert [state.document for state in ingresses.states] == [saved, saved]
    assert WeightsStore(tmp_path / "weights.sqlite3").latest() == saved


async def test_change_while_nobody_can_be_reached_is_kept_and_pushed_later(tmp_path: Path) -> None:
    ingresses = Ingresses(1)
    control = _control(tmp_path, ingresses)
    first = await control.put_weights(RoutingDocument(version=1), BEARER)
    ingresses.away = True
    second = await control.put_weights(first.model_copy(update={"router": "power-of-two"}), BEARER)
    ingresses.away = False
    assert ingresses.states[0].document == first
    await control._push()
    assert ingresses.states[0].document == second


async def test_restarted_ingress_is_right_after_the_next_push(tmp_path: Path) -> None:
    ingresses = Ingresses(1)
    control = _control(tmp_path, ingresses)
    saved = await control.put_weights(RoutingDocument(version=1, router="round-robin"), BEARER)
    ingresses.states = [_state(1)]
    await control._push()
    assert ingresses.states[0].document == saved


async def test_restarted_control_goes_on_from_the_saved_version(tmp_path: Path) -> None:
    saved = await _control(tmp_path, Ingresses(1)).put_weights(RoutingDocument(version=1), BEARER)
    assert await _control(tmp_path, Ingresses(1)).weights() == saved


async def test_until_the_first_change_the_newest_ingress_is_believed_anew_each_time(tmp_path: Path) -> None:
    ingresses = Ingresses(3, 5)
    control = _control(tmp_path, ingresses)
    assert (await control.weights()).version == 5
    ingresses.states = [_state(1)]
    assert (await control.weights()).weights.queue == 1.0


@pytest.mark.parametrize("authorization", ["", TOKEN, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x"])
async def test_change_without_the_token_is_refused_and_changes_nothing(tmp_path: Path, authorization: str) -> None:
    ingresses = Ingresses(1)
    with pytest.raises(HTTPException) as refused:
        await _control(tmp_path, ingresses).put_weights(RoutingDocument(router="round-robin"), authorization)
    assert refused.value.status_code == 401
    assert TOKEN not in str(refused.value.detail)
    assert ingresses.states[0].document.router == "lbgr"


async def test_change_of_an_old_version_is_409(tmp_path: Path) -> None:
    control = _control(tmp_path, Ingresses(1))
    await control.put_weights(RoutingDocument(version=1), BEARER)
    with pytest.raises(HTTPException) as refused:
        await control.put_weights(RoutingDocument(version=1), BEARER)
    assert refused.value.status_code == 409


async def test_nobody_to_ask_is_503_with_the_reason(tmp_path: Path) -> None:
    ingresses = Ingresses(1)
    ingresses.away = True
    with pytest.raises(HTTPException) as refused:
        await _control(tmp_path, ingresses).state()
    assert refused.value.status_code == 503
    assert "nobody there" in refused.value.detail


async def test_decision_is_told_by_the_ingress_that_made_it(tmp_path: Path) -> None:
    ingresses = Ingresses(1, 1)
    ingresses.states[1].decide(RouteRequest("q1", 90), ["r1", "r2"], 0.0)
    explanation = await _control(tmp_path, ingresses).decision("q1")
    assert (explanation["request_id"], explanation["weights_version"]) == ("q1", 1)
    assert {terms["replica_id"] for terms in explanation["candidates"]} == {"r1", "r2"}


async def test_decision_that_nobody_remembers_is_404_and_says_which_id_to_give(tmp_path: Path) -> None:
    with pytest.raises(HTTPException, match=r"'q9'.*x-fairway-request-id") as refused:
        await _control(tmp_path, Ingresses(1, 1)).decision("q9")
    assert refused.value.status_code == 404
