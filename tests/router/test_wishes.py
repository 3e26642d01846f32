"""A wish is followed where it is allowed and understood, and never fails a request."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config import IngressSettings, RoutingDocument
from serve_app.router import wishes
from serve_app.router.wishes import NO_WISH, Wish, WishLog, parse_wish

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["pin", "router", "x"]), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("said", "wish"),
    [
        ({}, NO_WISH),
        (None, NO_WISH),
        ({"pin": "r1"}, Wish(pin="r1")),
        ({"router": "round-robin"}, Wish(router="round-robin")),
        ({"pin": "r1", "router": "lbgr"}, Wish("r1", "lbgr")),
        ({"pin": None, "router": None}, NO_WISH),
        ("r1", Wish(note=wishes.NO_OBJECT)),
        (["pin"], Wish(note=wishes.NO_OBJECT)),
        (False, Wish(note=wishes.NO_OBJECT)),
        ({"pin": "r1", "priority": 1}, Wish(note=wishes.UNKNOWN_FIELD)),
        ({"pin": ""}, Wish(note=wishes.BAD_PIN)),
        ({"pin": 1}, Wish(note=wishes.BAD_PIN)),
        ({"pin": "\ud800"}, Wish(note=wishes.BAD_PIN)),
        ({"pin": "r" * 201}, Wish(note=wishes.BAD_PIN)),
        ({"pin": "r1", "router": "best"}, Wish(note=wishes.BAD_ROUTER)),
        ({"router": []}, Wish(note=wishes.BAD_ROUTER)),
    ],
)
def test_wish_is_taken_whole_or_not_at_all(said: Any, wish: Wish) -> None:
    assert parse_wish({"prompt": "x", "fairway": said}, allowed=True) == wish


@pytest.mark.parametrize("said", [{"pin": "r1"}, {}, "r1", 0])
def test_wish_where_none_are_allowed_only_leaves_a_note(said: Any) -> None:
    assert parse_wish({"fairway": said}, allowed=False) == Wish(note=wishes.NOT_ALLOWED)


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("body", [None, {}, {"prompt": "x"}, {"fairway": None}])
def test_body_without_a_wish_makes_none(body: dict[str, Any] | None, allowed: bool) -> None:
    wish = parse_wish(body, allowed=allowed)
    assert wish == NO_WISH
    assert not wish.was_made


@given(said=JSON, allowed=st.booleans())
def test_whatever_is_said_is_parsed_and_noted_from_a_fixed_set(said: Any, allowed: bool) -> None:
    wish = parse_wish({"fairway": said}, allowed=allowed)
    assert wish.note in ("", *wishes.NOTES)
    assert not wish.note or (wish.pin, wish.router) == (None, None)


def test_every_rule_of_the_document_may_be_named() -> None:
    for rule in wishes.RULES:
        assert RoutingDocument.model_validate({"router": rule}).router == rule
        assert parse_wish({"fairway": {"router": rule}}, allowed=True).router == rule


def test_pin_that_was_not_followed_is_noted() -> None:
    assert Wish(pin="gone").after("r1") == Wish(pin="gone", note=wishes.UNKNOWN_REPLICA)
    assert Wish(pin="r1").after("r1") == Wish(pin="r1")
    assert NO_WISH.after("r1") == NO_WISH


@pytest.mark.parametrize("note", wishes.NOTES)
def test_note_passes_the_patterns_by_which_haproxy_reads_the_answer(note: str) -> None:
    assert note.isascii()
    assert note.isprintable()
    assert not set(note) & set('"{}\\')


def test_log_counts_every_wish_and_keeps_the_last() -> None:
    log = WishLog(2)
    for number in range(3):
        log.keep(f"q{number}", Wish(pin=f"r{number}"))
    log.keep("q3", Wish(note=wishes.BAD_PIN))
    assert log.counts == {"": 3, wishes.BAD_PIN: 1}
    assert [log.get(f"q{number}") for number in range(4)] == [None, None, Wish(pin="r2"), Wish(note=wishes.BAD_PIN)]


def test_wishes_are_not_allowed_unless_the_settings_say_so() -> None:
    assert IngressSettings().allow_wishes is False
