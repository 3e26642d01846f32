"""The page: sound HTML, no request to anywhere else, and it reads only what the server says."""

import re
from collections import Counter
from dataclasses import asdict
from html.parser import HTMLParser
from typing import Any, get_args

from fastapi import FastAPI

from serve_app.config import RouterSettings, RoutingDocument, RoutingWeights
from serve_app.dashboard import PAGE
from serve_app.deployments.merged_state import merged_state
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.kv_events import KvEventCounters
from serve_app.router.routing_state import RouteRequest, RoutingState

HTML = PAGE.read_text()
VOID = {"meta", "link", "input", "br", "hr", "img"}


class Reader(HTMLParser):
    """Every tag with its attributes, the script's text, and whether tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.script = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> does not close the last open tag"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.script += data

    def close(self) -> None:
        super().close()
        assert self._open == [], self._open


def read() -> Reader:
    reader = Reader()
    reader.feed(HTML)
    reader.close()
    return reader


def values(attribute: str) -> list[str]:
    return [given[attribute] for _, given in read().tags if attribute in given]


def merged() -> dict[str, Any]:
    """What GET /fairway/state answers after one decision."""
    state = RoutingState(RouterSettings(), PrefillProfile.flat(), block_size_tokens=16)
    state.decide(RouteRequest("one", 100), ["a", "b"], 1.0)
    return merged_state([{"ingress": "i", **state.snapshot(2.0), "kv_events": asdict(KvEventCounters())}])


def test_every_id_that_the_script_asks_for_is_there_once() -> None:
    ids = Counter(values("id"))
    assert max(ids.values()) == 1
    asked = set(re.findall(r'\b(?:byId|say|fill)\("([\w-]+)"', read().script))
    made_by_the_script = {"set-router"}
    assert asked - made_by_the_script <= ids.keys()
    referred = {
        one for name in ("for", "aria-labelledby", "aria-describedby") for v in values(name) for one in v.split()
    }
    assert referred <= ids.keys()


def test_nothing_is_asked_of_another_host() -> None:
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", HTML.replace("http://www.w3.org/2000/svg", "")) == []
    assert [one for one in values("src") + values("href") + values("action") if not one.startswith("data:")] == []
    assert re.findall(r"@import|url\(", HTML) == []
    (policy,) = [given["content"] for _, given in read().tags if given.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_no_handler_is_inline_and_no_text_from_the_server_becomes_html() -> None:
    assert [name for _, given in read().tags for name in given if name.startswith("on")] == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", HTML) == []


def test_the_script_reads_only_fields_that_the_server_sends() -> None:
    state, script = merged(), read().script
    (decision,) = state["decisions"]
    (ingress,) = state["ingresses"]
    known = {
        "state": state,
        "replica": state["replicas"][0],
        "ingress": ingress,
        "totals": ingress["totals"],
        "residual": ingress["residual"],
        "decision": decision,
        "observed": decision["observed"],
        "candidate": decision["candidates"][0],
    }
    for name, fields in known.items():
        used = set(re.findall(rf"(?<![.\w]){name}\.(\w+)", script))
        assert used <= fields.keys(), (name, used - fields.keys())
        assert used, name


def test_bounds_and_sentences_come_from_the_server_for_every_setting() -> None:
    app = FastAPI()

    @app.put("/weights")
    def put_weights(document: RoutingDocument) -> RoutingDocument:
        return document

    api = app.openapi()
    body = api["paths"]["/weights"]["put"]["requestBody"]["content"]["application/json"]["schema"]
    document = _followed(api, body)["properties"]
    assert document["router"]["description"].endswith(".")
    assert document["router"]["enum"] == list(get_args(RoutingDocument.model_fields["router"].annotation))
    weights = _followed(api, document["weights"].get("allOf", [document["weights"]])[0])["properties"]
    assert weights.keys() == RoutingWeights.model_fields.keys()
    for rule in weights.values():
        assert rule["description"].endswith(".")
        assert "maximum" in rule
        assert ("minimum" in rule) != ("exclusiveMinimum" in rule)


def _followed(api: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    found: Any = api if "$ref" in part else part
    for key in part.get("$ref", "#").removeprefix("#").strip("/").split("/"):
        found = found[key] if key else found
    followed: dict[str, Any] = found
    return followed


def test_no_weight_is_named_in_the_script_so_no_formula_can_be_there() -> None:
    script = read().script
    terms = [
        name for name in RoutingWeights.model_fields if re.search(rf"\bweights?\.{name}\b|[\"']{name}[\"']", script)
    ]
    assert terms == []


def test_the_page_speaks_to_keyboards_and_screen_readers() -> None:
    tags = read().tags
    assert ("html", {"lang": "en"}) in tags
    assert sum(tag == "h1" for tag, _ in tags) == 1
    assert any(given.get("role") == "status" and given.get("aria-live") == "polite" for _, given in tags)
    labelled = set(values("for"))
    fixed = [given["id"] for tag, given in tags if tag in ("input", "select")]
    assert set(fixed) <= labelled
    assert all(given.get("type") in ("button", "submit") for tag, given in tags if tag == "button")
    assert all("scope" in given for tag, given in tags if tag == "th")
    scrolled = [given for tag, given in tags if tag == "div" and given.get("class") == "scroll"]
    assert scrolled
    assert all(given.get("tabindex") == "0" and "aria-labelledby" in given for given in scrolled)


def test_the_page_is_light_or_dark_as_the_reader_has_it_and_fits_a_phone() -> None:
    assert "@media (prefers-color-scheme: dark)" in HTML
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [given for _, given in read().tags]
    light, dark = HTML.split("@media (prefers-color-scheme: dark)")
    colours = set(re.findall(r"(--[\w-]+):", light))
    assert colours == set(re.findall(r"(--[\w-]+):", dark))
    assert colours == set(re.findall(r"var\((--[\w-]+)\)", HTML))
