"""The routing document over HTTP, for the command line: read it, change it within its bounds, put it back.

A change is checked here with the same model that the control deployment uses, so that a wrong value is explained
without a round trip. `version` makes a change that somebody else overtook fail instead of overwriting theirs.
"""

from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import ValidationError

from serve_app.config import RoutingDocument, RoutingWeights

WEIGHTS_PATH = "/fairway/weights"
TIMEOUT_S = 10.0
ROUTER_FIELD = "router"


class ControlError(RuntimeError):
    """The control application could not be reached or refused; the message says what to do."""


class ChangeError(ValueError):
    """A change names no field, or a value outside its field's bounds."""


def read_document(url: str) -> RoutingDocument:
    """The document in force. Raises ControlError."""
    return _document(_request("GET", url))


def put_document(url: str, token: str, document: RoutingDocument) -> RoutingDocument:
    """Replace the document whose `version` was read; the one that is in force afterwards. Raises ControlError."""
    headers = {"Authorization": f"Bearer {token}"}
    return _document(_request("PUT", url, json=document.model_dump(mode="json"), headers=headers))


def changed(document: RoutingDocument, assignments: Sequence[str]) -> RoutingDocument:
    """The document with every `field=value` applied; its version stays.

    Raises:
        ChangeError: the first field or value that is wrong, its bounds, and an example that is right.
    """
    router, weights = document.router, document.weights.model_dump()
    new: dict[str, Any] = {ROUTER_FIELD: router}
    for assignment in assignments:
        name, separator, value = (part.strip() for part in assignment.partition("="))
        if not separator or (name != ROUTER_FIELD and name not in weights):
            fields = ", ".join([ROUTER_FIELD, *weights])
            raise ChangeError(f"{assignment!r} is no change; write FIELD=VALUE with one of {fields}")
        target = new if name == ROUTER_FIELD else weights
        target[name] = value
        _check(name, value)
    return RoutingDocument.model_validate({"version": document.version, **new, "weights": weights})


def differences(before: RoutingDocument, after: RoutingDocument) -> list[str]:
    """One line `field: old -> new` for each difference, version first."""
    return [
        f"{name}: {old} -> {new}"
        for (name, old), (_, new) in zip(_flat(before).items(), _flat(after).items(), strict=True)
        if old != new
    ]


def as_lines(document: RoutingDocument) -> list[str]:
    """One line `field=value` for each field, as `changed` takes them, version first."""
    return [f"{name}={value}" for name, value in _flat(document).items()]


def _flat(document: RoutingDocument) -> dict[str, Any]:
    return {"version": document.version, ROUTER_FIELD: document.router, **document.weights.model_dump()}


def _check(name: str, value: str) -> None:
    owner = RoutingDocument if name == ROUTER_FIELD else RoutingWeights
    try:
        owner.model_validate({name: value})
    except ValidationError as error:
        raise ChangeError(f"{name} is {value!r}; it must be {_allowed(owner, name)}") from error


def _allowed(owner: type[RoutingDocument] | type[RoutingWeights], name: str) -> str:
    """A field's bounds in words, from its own schema, with its default as the example."""
    schema: dict[str, Any] = owner.model_json_schema()["properties"][name]
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}, for example {name}={schema['default']}"
    low = f"above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else f"at least {schema['minimum']:g}"
    return f"a number {low} and at most {schema['maximum']:g}, for example {name}={schema['default']:g}"


def _request(method: str, url: str, **options: Any) -> httpx.Response:
    address = url.rstrip("/") + WEIGHTS_PATH
    try:
        response = httpx.request(method, address, timeout=TIMEOUT_S, **options)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ControlError(f"{address} cannot be reached ({reason}); is it deployed, and is --url right?") from error
    if response.is_success:
        return response
    raise ControlError(_refusal(response, address))


def _refusal(response: httpx.Response, address: str) -> str:
    if response.status_code == 401:
        return f"{address} did not accept the token; give control's own in FAIRWAY_TOKEN or --token-file"
    if response.status_code == 404:
        return f"{address} does not exist; --url must name the host and port where the control application is deployed"
    detail = _detail(response)
    if response.status_code == 409:
        return f"somebody else changed the weights meanwhile ({detail}); nothing was changed, run it again"
    return f"{address} answered {response.status_code}: {detail}"


def _detail(response: httpx.Response) -> str:
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = response.text or response.reason_phrase
    return " ".join(str(detail).split())[:300]


def _document(response: httpx.Response) -> RoutingDocument:
    try:
        return RoutingDocument.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the body"
        raise ControlError(f"{response.url} answered something else than weights ({field}: {first['msg']})") from error
