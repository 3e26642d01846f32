"""From rows of a recorded trace to arrivals: which part is used, at what times, and the tokens of the prompts.

Traces hold lengths and the identity of their blocks, never texts: the tokens of a block are a hash (splitmix64, Steele
et al. 2014) of seed, block and position, so that one block is the same tokens everywhere and another shares nothing
with it. Cost: O(tokens) of the requests that are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from serve_app.sim.arrivals import Arrival
from serve_app.sim.draws import (
    FIRST_TOKEN_ID,
    NUM_TOKEN_IDS,
    FloatArray,
    TokenArray,
    check_above_zero,
    check_at_least,
    check_from_zero,
)

KeyArray = npt.NDArray[np.uint64]

TooLong = Literal["drop", "cut"]


@dataclass(frozen=True, slots=True)
class TraceParams:
    """Which part of a trace is used, and how."""

    start_s: float = 0.0
    """Seconds into the trace at which the part begins, at least 0; it becomes time 0."""
    duration_s: float | None = None
    """Length of the part in the trace's own seconds, above 0; None: to the end."""
    max_requests: int | None = None
    """Requests that are kept, the first ones, at least 1; None: all."""
    rate_multiplier: float = 1.0
    """How many times faster requests come than in the trace, above 0."""
    max_prompt_tokens: int | None = None
    """Longest prompt, at least 1; None: no bound."""
    too_long: TooLong = "drop"
    """What becomes of longer prompts: "drop" leaves the request out, "cut" keeps the prompt's beginning. Either is
    counted."""
    output_tokens: int | None = None
    """Tokens that each request generates in place of the trace's, at least 1; None: the trace's."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_from_zero(self, "start_s")
        check_above_zero(self, "rate_multiplier", *([] if self.duration_s is None else ["duration_s"]))
        optional = ("max_requests", "max_prompt_tokens", "output_tokens")
        check_at_least(1, self, *(name for name in optional if getattr(self, name) is not None))
        if self.too_long not in get_args(TooLong):
            raise ValueError(f"too_long is {self.too_long!r}; it must be one of {get_args(TooLong)}")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What was read, and what was left out of it within its part."""

    arrivals: list[Arrival]
    """In order of arrival; one phase, "all"."""
    num_cut: int
    """Requests among the arrivals whose prompts were cut."""
    num_dropped: int
    """Requests that were left out because their prompts are too long."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """A row before its prompt is made: most of a long trace may not be used."""

    at_s: float
    """Seconds from the beginning of the trace, at least 0."""
    prompt_tokens: int
    output_tokens: int
    first_tokens: Callable[[int], TokenArray]
    """The first n tokens of the prompt."""


def trace(name: str, requests: Sequence[TraceRequest], params: TraceParams) -> Trace:
    """The part that `params` asks for, of requests in any order."""
    end_s = np.inf if params.duration_s is None else params.start_s + params.duration_s
    in_order = sorted(requests, key=attrgetter("at_s"))
    part = [one for one in in_order if params.start_s <= one.at_s < end_s]
    longest = params.max_prompt_tokens or max((one.prompt_tokens for one in part), default=1)
    arrivals: list[Arrival] = []
    num_cut = num_dropped = 0
    for one in part:
        if len(arrivals) == params.max_requests:
            break
        too_long = one.prompt_tokens > longest
        if too_long and params.too_long == "drop":
            num_dropped += 1
            continue
        num_cut += too_long
        at_s = (one.at_s - params.start_s) / params.rate_multiplier
        prompt = one.first_tokens(min(one.prompt_tokens, longest))
        output_tokens = params.output_tokens or one.output_tokens
        arrivals.append(Arrival(at_s, f"{name}-{len(arrivals)}", prompt, output_tokens, "all"))
    return Trace(arrivals, num_cut, num_dropped)


def spread_times(times_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    """(n,), ascending: times that several share are drawn uniformly from the step that follows; see `read_mooncake`."""
    distinct, inverse, counts = np.unique(times_s, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        return times_s
    gaps_s = np.diff(distinct)
    steps_s = np.minimum(np.append(gaps_s, np.inf), np.median(gaps_s))
    spread = times_s + np.where(counts > 1, steps_s, 0.0)[inverse] * rng.random(len(times_s))
    return np.sort(spread)


def block_tokens(keys: KeyArray, block_size_tokens: int, count: int, seed: int) -> TokenArray:
    """(count,), the first tokens of blocks with these keys, which must have as many."""
    needed = keys[: -(-count // block_size_tokens)]
    with np.errstate(over="ignore"):
        starts = _mixed(needed + np.uint64(seed) * _GAMMA)
        counters = np.arange(1, block_size_tokens + 1, dtype=np.uint64) * _GAMMA
        hashes = _mixed(starts[:, None] + counters).ravel()[:count]
    # The high half times the range, then its high half again: uniform over the range without a division.
    ids = (hashes >> np.uint64(32)) * np.uint64(NUM_TOKEN_IDS) >> np.uint64(32)
    return ids.astype(np.int32) + np.int32(FIRST_TOKEN_ID)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mixed(state: KeyArray) -> KeyArray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
