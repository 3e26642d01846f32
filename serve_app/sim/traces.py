"""Recorded traces as workloads: Mooncake's, agents' coding sessions, Azure's; and where their data lies.

Formats as the data's own README describes them. What becomes of the rows is in `trace_requests`. Cost: O(bytes of the
file + tokens of the requests that are kept).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import numpy as np

from serve_app.sim.draws import TokenArray, check_above_zero, check_at_least, draw_tokens
from serve_app.sim.trace_requests import Trace, TraceParams, TraceRequest, block_tokens, spread_times, trace
from serve_app.sim.trace_rows import Row, csv_rows, json_rows

__all__ = [
    "CodingParams",
    "Trace",
    "TraceParams",
    "data_dir",
    "read_azure",
    "read_coding_sessions",
    "read_mooncake",
]

MOONCAKE_BLOCK_TOKENS = 512
SESSION_STRIDE, TAIL_IDS = np.uint64(1 << 32), np.uint64(1 << 31)
"""Between the keys of two sessions' blocks, and from a session's blocks to its requests' tails."""

DATA_VARIABLE = "FAIRWAY_DATA"


def read_mooncake(path: Path, params: TraceParams, rng: np.random.Generator) -> Trace:
    """Mooncake's JSON lines: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks.

    Requests of one timestamp are spread uniformly over the step that follows it, in the file's order (the conversation
    trace has steps of 3 s with ten requests each, which would come as a train of bursts). The step is the median gap
    between timestamps, and no more than the gap to the next one. A request alone keeps its time.

    Raises:
        ValueError: a bad row, by file, line and field.
    """
    seed = _seed(rng)
    requests = [_mooncake_request(row, seed) for row in json_rows(path)]
    requests.sort(key=attrgetter("at_s"))
    times_s = spread_times(np.asarray([one.at_s for one in requests], dtype=np.float64), rng)
    spread = [replace(one, at_s=at_s) for one, at_s in zip(requests, times_s.tolist(), strict=True)]
    return trace("mooncake", spread, params)


@dataclass(frozen=True, slots=True)
class CodingParams:
    """How sessions without a common clock become a workload."""

    sessions_per_s: float = 0.02
    """Sessions that start a second, of the Poisson process, above 0."""
    max_sessions: int | None = None
    """Sessions that are used, the file's first ones, at least 1; None: all."""
    max_session_tokens: int | None = None
    """Sessions with a longer prompt are left out whole, at least 1; None: none are."""
    max_gap_s: float | None = None
    """Longer pauses within a session are shortened to this, above 0 (a person's pauses have p99 2,947 s); None: as
    they were."""
    shared_prefix: bool = False
    """Whether all sessions begin with the same tools and system prompt, as far as theirs reach; block ids are local to
    a session, so the file does not say."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_above_zero(self, "sessions_per_s", *([] if self.max_gap_s is None else ["max_gap_s"]))
        optional = ("max_sessions", "max_session_tokens")
        check_at_least(1, self, *(name for name in optional if getattr(self, name) is not None))


def read_coding_sessions(path: Path, params: TraceParams, coding: CodingParams, rng: np.random.Generator) -> Trace:
    """Sessions of coding agents, one a line: `block_size`, `tool_tokens`, `system_tokens`, `requests` of `t`, `in`,
    `out` and `runs` of block ids; sessions start at Poisson times, in the file's order.

    Tokens after the last full block, which have no id, are new in each request. An answer of 0 tokens becomes one of 1.

    Raises:
        ValueError: a bad row, by file, line and field.
    """
    seed, start_s, used = _seed(rng), 0.0, 0
    requests: list[TraceRequest] = []
    for number, row in enumerate(json_rows(path)):
        if coding.max_sessions is not None and used >= coding.max_sessions:
            break
        session = _session_requests(row, number, coding, seed)
        if coding.max_session_tokens is None or max(one.prompt_tokens for one in session) <= coding.max_session_tokens:
            start_s, used = start_s + rng.exponential(1 / coding.sessions_per_s), used + 1
            requests += [replace(one, at_s=start_s + one.at_s) for one in session]
    return trace("coding", requests, params)


def read_azure(path: Path, params: TraceParams, rng: np.random.Generator) -> Trace:
    """A trace in Azure's CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. No prompt shares anything.

    Raises:
        ValueError: a bad row, by file, line and field.
    """
    requests = [
        TraceRequest(
            row.time_s("TIMESTAMP"),
            row.integer("ContextTokens", 1),
            row.integer("GeneratedTokens", 1),
            lambda count: draw_tokens(count, rng),
        )
        for row in csv_rows(path)
    ]
    first_s = min((one.at_s for one in requests), default=0.0)
    return trace("azure", [replace(one, at_s=one.at_s - first_s) for one in requests], params)


def data_dir(environ: Mapping[str, str]) -> Path | None:
    """Folder of the recorded data: the one that `FAIRWAY_DATA` names, or `shared/data` beside the checkout, or None.

    Raises:
        ValueError: the variable names something that is not a folder.
    """
    named = environ.get(DATA_VARIABLE)
    if named and not Path(named).is_dir():
        raise ValueError(f"{DATA_VARIABLE} is {named!r}; it must be a folder")
    folder = Path(named) if named else Path(__file__).parents[2].parent / "shared" / "data"
    return folder if folder.is_dir() else None


def _mooncake_request(row: Row, seed: int) -> TraceRequest:
    prompt_tokens, ids = row.integer("input_length", 1), row.integers("hash_ids", 0)
    if len(ids) != -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(
            f"{row.place}: hash_ids has {len(ids)} blocks; input_length {prompt_tokens} must have "
            f"{-(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)} of {MOONCAKE_BLOCK_TOKENS}"
        )
    blocks = np.asarray(ids, dtype=np.uint64)
    return TraceRequest(
        row.number("timestamp", 0) / 1e3,
        prompt_tokens,
        row.integer("output_length", 1),
        lambda count: block_tokens(blocks, MOONCAKE_BLOCK_TOKENS, count, seed),
    )


@dataclass(frozen=True, slots=True)
class _SessionBlocks:
    """What tells one request's blocks from other sessions' and requests'."""

    block_size_tokens: int
    shared_blocks: int
    """Ids up to this one mean the same in all sessions."""
    session: int
    request: int
    seed: int

    def first_tokens(self, runs: list[tuple[int, int]], count: int) -> TokenArray:
        """(count,), the prompt's beginning; `runs` are [first id, count] of its full blocks."""
        ids = [np.arange(first, first + length, dtype=np.uint64) for first, length in runs]
        # What follows the last full block has no id: one that no other request has.
        keys = np.concatenate([*ids, np.asarray([TAIL_IDS + np.uint64(self.request)])])
        own = np.uint64(self.session + 1) * SESSION_STRIDE
        keys += np.where(keys <= self.shared_blocks, np.uint64(0), own)
        return block_tokens(keys, self.block_size_tokens, count, self.seed)


def _session_requests(row: Row, number: int, coding: CodingParams, seed: int) -> list[TraceRequest]:
    """A session's requests in order, from time 0 on; `number` tells sessions apart."""
    block_size_tokens = row.integer("block_size", 1)
    prefix_tokens = row.integer("tool_tokens", 0) + row.integer("system_tokens", 0)
    shared_blocks = prefix_tokens // block_size_tokens if coding.shared_prefix else 0
    requests = row.rows("requests")
    times_s = np.asarray([one.number("t", 0) for one in requests])
    if np.any(np.diff(times_s) < 0):
        raise ValueError(f"{row.place}: requests have a t below the one before; they must be in order")
    gaps_s = np.minimum(np.diff(times_s), coding.max_gap_s or np.inf)
    return [
        _session_request(one, at_s, _SessionBlocks(block_size_tokens, shared_blocks, number, index, seed))
        for index, (one, at_s) in enumerate(zip(requests, np.append(0.0, np.cumsum(gaps_s)).tolist(), strict=True))
    ]


def _session_request(row: Row, at_s: float, blocks: _SessionBlocks) -> TraceRequest:
    prompt_tokens, runs = row.integer("in", 1), row.pairs("runs", 1)
    num_blocks, full_blocks = sum(count for _, count in runs), prompt_tokens // blocks.block_size_tokens
    if num_blocks != full_blocks:
        raise ValueError(f"{row.place}: runs has {num_blocks} blocks; in {prompt_tokens} must have {full_blocks}")
    return TraceRequest(at_s, prompt_tokens, max(1, row.integer("out", 0)), partial(blocks.first_tokens, runs))


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**63))
