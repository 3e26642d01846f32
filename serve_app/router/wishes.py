"""What a client may say to routing: the body's `fairway` object, beside the OpenAI fields.

    {"fairway": {"pin": "<replica id>", "router": "<rule>"}}

A wish never fails a request: one that is not allowed or not understood counts as not made, and the answer says so.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from serve_app.config import RoutingDocument

BODY_FIELD = "fairway"
RULES = frozenset(get_args(RoutingDocument.model_fields["router"].annotation))
"""Rules that a wish may name."""

MAX_PIN_CHARS = 200

# The notes travel through HAProxy's Lua in a response that it reads with patterns: no quotes, no braces.
NOT_ALLOWED = "ignored: wishes are not allowed here"
NO_OBJECT = "ignored: fairway must be an object"
UNKNOWN_FIELD = "ignored: fairway may hold pin and router only"
BAD_PIN = "ignored: pin must be the id of a replica"
BAD_ROUTER = "ignored: router must be the name of a rule"
UNKNOWN_REPLICA = "pin ignored: no such replica runs"
NOTES = (NOT_ALLOWED, NO_OBJECT, UNKNOWN_FIELD, BAD_PIN, BAD_ROUTER, UNKNOWN_REPLICA)
"""Everything that the header `x-fairway-note` can say."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What one request asks of its routing; empty when it asks nothing or may not ask."""

    pin: str | None = None
    """Replica that shall serve it."""
    router: str | None = None
    """Rule that shall rank the replicas, instead of the live document's."""
    note: str = ""
    """Why the wish, or a part of it, was ignored: one of `NOTES`; empty when nothing was."""

    @property
    def was_made(self) -> bool:
        """Whether the request said anything at all to routing."""
        return bool(self.pin or self.router or self.note)

    def after(self, replica_id: str) -> "Wish":
        """The wish once `replica_id` was picked: a pin that was not followed named no running replica."""
        if self.pin is None or self.pin == replica_id:
            return self
        return replace(self, note=UNKNOWN_REPLICA)


NO_WISH = Wish()


def parse_wish(body: Mapping[str, Any] | None, *, allowed: bool) -> Wish:
    """The wish in a request's parsed body; pure, and never raises.

    Args:
        body: the parsed object; None when the body could not be parsed.
        allowed: `IngressSettings.allow_wishes`.
    """
    said = body.get(BODY_FIELD) if body else None
    if said is None:
        return NO_WISH
    if not allowed:
        return Wish(note=NOT_ALLOWED)
    if not isinstance(said, Mapping):
        return Wish(note=NO_OBJECT)
    if set(said) - {"pin", "router"}:
        return Wish(note=UNKNOWN_FIELD)
    pin, router = said.get("pin"), said.get("router")
    if pin is not None and not (isinstance(pin, str) and 0 < len(pin) <= MAX_PIN_CHARS and pin.isascii()):
        return Wish(note=BAD_PIN)
    if router is not None and not (isinstance(router, str) and router in RULES):
        return Wish(note=BAD_ROUTER)
    return Wish(pin, router)


class WishLog:
    """The wishes of the last requests that made one, by request id, and how many ended how."""

    def __init__(self, capacity: int) -> None:
        """Args: capacity: most wishes to keep; over it the oldest goes."""
        self._capacity = capacity
        self._wishes: OrderedDict[str, Wish] = OrderedDict()
        self.counts: dict[str, int] = {}
        """Wishes by note; "" counts those that were followed."""

    def keep(self, request_id: str, wish: Wish) -> None:
        """Count and keep a wish that was made."""
        self.counts[wish.note] = self.counts.get(wish.note, 0) + 1
        self._wishes[request_id] = wish
        if len(self._wishes) > self._capacity:
            self._wishes.popitem(last=False)

    def get(self, request_id: str) -> Wish | None:
        """The request's wish; None when it made none or has left the log."""
        return self._wishes.get(request_id)
