"""Recorded traces come at their own times, and prompts share exactly the blocks whose ids they share."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_app.sim import traces
from serve_app.sim.draws import FIRST_TOKEN_ID, NUM_TOKEN_IDS
from serve_app.sim.trace_requests import block_tokens, spread_times
from serve_app.sim.traces import CodingParams, TraceParams, data_dir, read_azure, read_coding_sessions, read_mooncake
from serve_app.sim.workloads import infinite_cache_hit_rate

Rows = list[dict[str, Any]]
DATA = data_dir(os.environ)
needs_data = pytest.mark.skipif(
    DATA is None, reason=f"the recorded data is absent; {traces.DATA_VARIABLE} names its folder"
)

MOONCAKE: Rows = [
    {"timestamp": 0, "input_length": 1_000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 1_100, "output_length": 6, "hash_ids": [0, 1, 2]},
    {"timestamp": 3_000, "input_length": 512, "output_length": 7, "hash_ids": [0]},
    {"timestamp": 6_000, "input_length": 600, "output_length": 1, "hash_ids": [3, 4]},
]
SESSIONS: Rows = [
    {
        "id": name,
        "block_size": 64,
        "tool_tokens": 100,
        "system_tokens": 50,
        "requests": [
            {"t": 0.0, "in": 200, "out": 9, "runs": [[1, 3]]},
            {"t": 4.0, "in": 330, "out": 0, "runs": [[1, 3], [7, 2]]},
            {"t": 1_000.0, "in": 200, "out": 3, "runs": [[1, 3]]},
        ],
    }
    for name in ("a", "b")
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:48.1805900,20,1"
)


def written(folder: Path, rows: Rows, name: str = "trace.jsonl") -> Path:
    path = folder / name
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def mooncake(path: Path, seed: int = 0, **params: Any) -> traces.Trace:
    return read_mooncake(path, TraceParams(**params), np.random.default_rng(seed))


def coding(path: Path, seed: int = 0, params: TraceParams | None = None, **own: Any) -> traces.Trace:
    return read_coding_sessions(path, params or TraceParams(), CodingParams(**own), np.random.default_rng(seed))


def common(one: Any, other: Any) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_rows_become_arrivals_that_share_their_blocks(tmp_path: Path, name: str) -> None:
    trace = mooncake(written(tmp_path, MOONCAKE, name))
    first, second, third, fourth = (one.prompt for one in trace.arrivals)
    assert [len(one.prompt) for one in trace.arrivals] == [1_000, 1_100, 512, 600]
    assert [one.output_tokens for one in trace.arrivals] == [5, 6, 7, 1]
    assert [one.request_id for one in trace.arrivals] == [f"mooncake-{number}" for number in range(4)]
    assert {one.phase for one in trace.arrivals} == {"all"}
    assert [common(first, second), common(second, third), common(third, fourth)] == [1_000, 512, 0]


def test_mooncake_times_are_its_own_and_equal_ones_spread_over_their_step(tmp_path: Path) -> None:
    times_s = [one.at_s for one in mooncake(written(tmp_path, MOONCAKE)).arrivals]
    assert times_s == sorted(times_s)
    assert 0.0 < times_s[0] < times_s[1] < 3.0
    assert times_s[2:] == [3.0, 6.0]


def test_same_seed_reads_the_same_trace_and_another_seed_other_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    first, again, other = (mooncake(path, seed).arrivals for seed in (1, 1, 2))
    assert [(one.at_s, one.prompt.tolist()) for one in first] == [(one.at_s, one.prompt.tolist()) for one in again]
    assert common(first[2].prompt, other[2].prompt) == 0


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE[::-1])
    assert [one.output_tokens for one in mooncake(path).arrivals] == [6, 5, 7, 1]


def test_spread_keeps_order_lone_times_and_steps() -> None:
    times_s = np.repeat([0.0, 3.0, 6.0, 12.0, 15.0], [50, 1, 60, 2, 40])
    spread = spread_times(times_s, np.random.default_rng(0))
    assert spread.tolist() == sorted(spread.tolist())
    assert spread[50] == 3.0
    assert np.all((spread >= times_s) & (spread < times_s + 3.0))
    assert np.mean(spread[51:111]) == pytest.approx(7.5, abs=0.5)
    assert spread_times(np.zeros(3), np.random.default_rng(0)).tolist() == [0.0, 0.0, 0.0]


def test_window_becomes_time_zero_and_the_multiplier_compresses_it(tmp_path: Path) -> None:
    trace = mooncake(written(tmp_path, MOONCAKE), start_s=2.9, duration_s=3.2, rate_multiplier=10.0)
    assert [one.output_tokens for one in trace.arrivals] == [7, 1]
    assert [one.at_s for one in trace.arrivals] == pytest.approx([0.01, 0.31])
    assert len(mooncake(written(tmp_path, MOONCAKE), start_s=3.0, duration_s=3.0).arrivals) == 1


def test_max_requests_keeps_the_first_and_output_tokens_can_be_set(tmp_path: Path) -> None:
    trace = mooncake(written(tmp_path, MOONCAKE), max_requests=2, output_tokens=1)
    assert [(len(one.prompt), one.output_tokens) for one in trace.arrivals] == [(1_000, 1), (1_100, 1)]


def test_long_prompts_are_dropped_or_cut_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    whole = mooncake(path).arrivals
    dropped = mooncake(path, max_prompt_tokens=700)
    assert ([len(one.prompt) for one in dropped.arrivals], dropped.num_dropped, dropped.num_cut) == ([512, 600], 2, 0)
    cut = mooncake(path, max_prompt_tokens=700, too_long="cut")
    assert ([len(one.prompt) for one in cut.arrivals], cut.num_dropped, cut.num_cut) == ([700, 700, 512, 600], 0, 2)
    assert all(
        common(one.prompt, same.prompt) == len(one.prompt) for one, same in zip(cut.arrivals, whole, strict=True)
    )


def test_block_tokens_are_uniform_and_their_own() -> None:
    keys = np.arange(2_000, dtype=np.uint64)
    tokens = block_tokens(keys, 64, 2_000 * 64, seed=3)
    assert tokens.min() >= FIRST_TOKEN_ID
    assert tokens.max() < FIRST_TOKEN_ID + NUM_TOKEN_IDS
    counts = np.histogram(tokens, bins=30, range=(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKEN_IDS))[0]
    assert counts == pytest.approx(np.full(30, 2_000 * 64 / 30), rel=0.06)
    assert len({tuple(block[:4].tolist()) for block in tokens.reshape(2_000, 64)}) == 2_000
    assert block_tokens(keys[5:6], 64, 10, seed=3).tolist() == tokens[5 * 64 : 5 * 64 + 10].tolist()
    assert not np.array_equal(block_tokens(keys, 64, 64, seed=4), tokens[:64])


def test_coding_sessions_share_ids_within_a_session_only(tmp_path: Path) -> None:
    trace = coding(written(tmp_path, SESSIONS))
    assert sorted(len(one.prompt) for one in trace.arrivals) == [200] * 4 + [330] * 2
    alone = coding(written(tmp_path, SESSIONS[:1]))
    first, second, third = (one.prompt for one in alone.arrivals)
    # Three blocks of 64 have ids; the 8 tokens after them are new in each request.
    assert [common(first, second), common(first, third)] == [192, 192]
    assert [one.output_tokens for one in alone.arrivals] == [9, 1, 3]
    starts = {tuple(one.prompt[:64].tolist()) for one in trace.arrivals}
    assert len(starts) == 2


def test_coding_sessions_can_share_tools_and_system_prompt(tmp_path: Path) -> None:
    prompts = [one.prompt for one in coding(written(tmp_path, SESSIONS), shared_prefix=True).arrivals]
    # 150 tokens of tools and system prompt are two full blocks of 64.
    assert sorted({common(one, other) for one in prompts for other in prompts if one is not other}) == [128, 192]


def test_coding_sessions_start_at_poisson_times_and_long_pauses_can_be_shortened(tmp_path: Path) -> None:
    one_request = [{**SESSIONS[0], "requests": SESSIONS[0]["requests"][:1]}]
    starts_s = [one.at_s for one in coding(written(tmp_path, one_request * 1_000), sessions_per_s=0.5).arrivals]
    assert np.mean(np.diff(starts_s)) == pytest.approx(2.0, rel=0.12)
    alone = coding(written(tmp_path, SESSIONS[:1]), max_gap_s=30.0).arrivals
    assert np.diff([one.at_s for one in alone]) == pytest.approx([4.0, 30.0])


def test_coding_sessions_are_chosen_whole(tmp_path: Path) -> None:
    long = {**SESSIONS[0], "requests": [{"t": 0, "in": 640, "out": 1, "runs": [[1, 10]]}]}
    path = written(tmp_path, [long, *SESSIONS])
    assert len(coding(path, max_session_tokens=600, max_sessions=1).arrivals) == 3
    assert len(coding(path, max_sessions=1).arrivals) == 1


def test_azure_rows_have_lengths_and_times_and_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    first, second = read_azure(path, TraceParams(), np.random.default_rng(0)).arrivals
    assert (len(first.prompt), first.output_tokens, len(second.prompt), second.output_tokens) == (374, 44, 20, 1)
    assert [first.at_s, second.at_s] == pytest.approx([0.0, 1.5])
    assert common(first.prompt, second.prompt) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", -1),
        ("timestamp", "0"),
        ("timestamp", None),
        ("timestamp", float("inf")),
        ("input_length", 0),
        ("input_length", 1.5),
        ("input_length", True),
        ("output_length", 0),
        ("hash_ids", [0, -1]),
        ("hash_ids", [0, 1, 2]),
        ("hash_ids", [0, 2**63]),
        ("hash_ids", 7),
    ],
)
def test_bad_mooncake_field_is_named_with_file_and_line(tmp_path: Path, field: str, value: Any) -> None:
    path = written(tmp_path, [MOONCAKE[0], {**MOONCAKE[0], field: value}])
    with pytest.raises(ValueError, match=rf"trace\.jsonl:2: {field} "):
        mooncake(path)


def test_missing_field_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, [{"timestamp": 0, "input_length": 5}])
    with pytest.raises(ValueError, match=r"trace\.jsonl:1: hash_ids is missing"):
        mooncake(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"timestamp": 0\n', "trace:1: not JSON"),
        (b"\n[1]\n", "trace:2: not a JSON object"),
        (b"\xff\n", "trace:1: cannot be read"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        mooncake(path)


@pytest.mark.parametrize("broken", ["cut", "plain", "garbled"])
def test_broken_gzip_is_named(tmp_path: Path, broken: str) -> None:
    path = written(tmp_path, MOONCAKE, "trace.jsonl.gz")
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-12], "plain": b"{}", "garbled": whole[:12] + bytes(40) + whole[52:]}[broken])
    with pytest.raises(ValueError, match=r"trace\.jsonl\.gz:\d+: cannot be read"):
        mooncake(path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("block_size",), 0, "block_size"),
        (("tool_tokens",), -1, "tool_tokens"),
        (("requests",), [], "requests"),
        (("requests",), [3], "requests"),
        (("requests", 0, "in"), 0, r"requests\[0\]: in "),
        (("requests", 0, "in"), 10, r"requests\[0\]: runs has 3 blocks; in 10 must have 0"),
        (("requests", 1, "t"), 2_000.0, "requests have a t below the one before"),
        (("requests", 1, "runs"), [[1]], r"requests\[1\]: runs "),
        (("requests", 1, "runs"), [[0, 5]], r"requests\[1\]: runs "),
        (("requests", 2, "out"), -1, r"requests\[2\]: out "),
    ],
)
def test_bad_coding_field_is_named(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    session = json.loads(json.dumps(SESSIONS[0]))
    place = session
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=rf"trace\.jsonl:1: {message}"):
        coding(written(tmp_path, [session]))


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("soon,5,5", "TIMESTAMP"),
        ("2023-11-16 18:15:46+00:00,5,5", "TIMESTAMP"),
        ("2023-11-16 18:15:46,0,5", "ContextTokens"),
        ("2023-11-16 18:15:46,x,5", "ContextTokens"),
        ("2023-11-16 18:15:46,5", "GeneratedTokens"),
    ],
)
def test_bad_azure_field_is_named(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"azure\.csv:3: {field} is"):
        read_azure(path, TraceParams(), np.random.default_rng(0))


def test_empty_file_is_an_empty_trace(tmp_path: Path) -> None:
    path = written(tmp_path, [])
    assert [mooncake(path).arrivals, coding(path).arrivals] == [[], []]
    assert read_azure(path, TraceParams(), np.random.default_rng(0)).arrivals == []


def test_data_folder_is_the_one_named_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_dir({"FAIRWAY_DATA": str(tmp_path)}) == tmp_path
    with pytest.raises(ValueError, match="FAIRWAY_DATA is"):
        data_dir({"FAIRWAY_DATA": str(tmp_path / "absent")})
    monkeypatch.setattr(traces, "__file__", str(tmp_path / "checkout" / "serve_app" / "sim" / "traces.py"))
    assert data_dir({}) is None
    (tmp_path / "shared" / "data").mkdir(parents=True)
    assert data_dir({}) == tmp_path / "shared" / "data"


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        (TraceParams(), "start_s", -1.0),
        (TraceParams(), "duration_s", 0.0),
        (TraceParams(), "max_requests", 0),
        (TraceParams(), "rate_multiplier", 0.0),
        (TraceParams(), "max_prompt_tokens", 0),
        (TraceParams(), "too_long", "keep"),
        (TraceParams(), "output_tokens", 0),
        (CodingParams(), "sessions_per_s", 0.0),
        (CodingParams(), "max_sessions", 0),
        (CodingParams(), "max_session_tokens", 0),
        (CodingParams(), "max_gap_s", 0.0),
    ],
)
def test_parameter_out_of_range_is_refused_by_name(params: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        replace(params, **{field: value})


@needs_data
def test_mooncake_fragment_repeats_what_its_ids_repeat() -> None:
    assert DATA is not None
    (path,) = (DATA / "mooncake_arxiv_fragment").glob("*.jsonl.gz")
    arrivals = mooncake(path, start_s=1_178.0).arrivals
    assert (len(arrivals), sum(len(one.prompt) for one in arrivals)) == (93, 715_620)
    seen: set[int] = set()
    hit_tokens = 0
    with gzip.open(path, "rt") as lines:
        for row in map(json.loads, lines):
            full = row["hash_ids"][: (row["input_length"] - 1) // 512]
            hit_tokens += 512 * sum(block in seen for block in full)
            seen.update(row["hash_ids"])
    # A block that is only half there in one prompt is not a full block of both.
    assert infinite_cache_hit_rate(arrivals, 512) == pytest.approx(hit_tokens / 715_620, abs=0.01)


@needs_data
def test_part_of_the_real_conversation_trace_comes_at_its_rate() -> None:
    assert DATA is not None
    path = DATA / "mooncake" / "conversation_trace.jsonl.gz"
    trace = mooncake(path, start_s=600.0, duration_s=120.0, max_prompt_tokens=16_384)
    arrivals = trace.arrivals
    assert (len(arrivals) + trace.num_dropped) / 120 == pytest.approx(3.4, rel=0.3)
    # Steps of 3 s with ten requests each have hardly ten distinct gaps; spread, they look Poisson.
    gaps_s = np.diff([one.at_s for one in arrivals])
    assert np.std(gaps_s) / np.mean(gaps_s) == pytest.approx(1.0, abs=0.2)
    assert len({tuple(one.prompt[:512].tolist()) for one in arrivals}) == 1


@needs_data
def test_real_azure_trace_has_the_lengths_that_its_readme_says() -> None:
    assert DATA is not None
    path = DATA / "azure_llm_2023" / "AzureLLMInferenceTrace_code.csv.gz"
    arrivals = read_azure(path, TraceParams(), np.random.default_rng(0)).arrivals
    lengths = [len(one.prompt) for one in arrivals]
    assert (len(arrivals), max(lengths), round(np.mean(lengths))) == (8_819, 7_437, 2_048)
    assert arrivals[-1].at_s == pytest.approx(3_436, abs=1)


@needs_data
def test_real_coding_sessions_reuse_what_their_readme_says() -> None:
    assert DATA is not None
    path = DATA / "coding_sessions" / "sessions_compact.jsonl.gz"
    arrivals = coding(path, sessions_per_s=0.05, max_session_tokens=64 * 1_024).arrivals
    assert len({one.request_id for one in arrivals}) == len(arrivals) == 1_007
    assert sum(len(one.prompt) for one in arrivals) == pytest.approx(36.1e6, abs=0.05e6)
    assert infinite_cache_hit_rate(arrivals, 64) == pytest.approx(0.917, abs=0.001)
