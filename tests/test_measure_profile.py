"""The profile's measurement, on an engine whose times are known, and on the real one."""

import json
import random
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import measure_profile
from serve_app.config import PrefillTable
from serve_app.measure_profile import (
    BLOCK_TOKENS,
    MAX_ERROR_CHARACTERS,
    WARM_UP_RUNS,
    LengthTimes,
    ProfileError,
    fitted_line,
    measure,
    one_line,
    table_from,
    write_table,
)

DESCRIPTION = {"device": "none", "model": "none", "dtype": "float32", "vllm_version": "0.29.0"}


class KnownEngine:
    """Keeps whole KV blocks and takes `base_s`, plus seconds for each cached and each computed token, on its clock."""

    num_vocabulary = 50_000

    def __init__(self, base_s: float, hit_s: float, miss_s: float) -> None:
        self.now_s = 0.0
        self.prompts: list[tuple[int, ...]] = []
        self._costs = (base_s, hit_s, miss_s)
        self._blocks: set[tuple[int, ...]] = set()

    def prefill(self, token_ids: Sequence[int]) -> int:
        """As vLLM: of a prompt that is cached to its end, the last token is computed again."""
        prompt = tuple(token_ids)
        self.prompts.append(prompt)
        prefixes = [prompt[:end] for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)]
        cached = sum(BLOCK_TOKENS for prefix in prefixes if prefix in self._blocks and len(prefix) < len(prompt))
        self._blocks.update(prefixes)
        base_s, hit_s, miss_s = self._costs
        self.now_s += base_s + hit_s * cached + miss_s * (len(prompt) - cached)
        return cached


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> KnownEngine:
    """The engine, and its clock as the module's own."""
    known = KnownEngine(base_s=0.1, hit_s=1e-5, miss_s=2e-3)
    monkeypatch.setattr("serve_app.measure_profile.time.perf_counter", lambda: known.now_s)
    monkeypatch.setattr("serve_app.measure_profile.time.monotonic", lambda: known.now_s)
    return known


def test_known_costs_are_found_again(engine: KnownEngine) -> None:
    table = table_from(measure(engine, [64, 1024, 256, 1000], 3, 1e6, lambda *report: None), **DESCRIPTION)
    assert table.tokens == (64, 256, 1000, 1024)
    assert table.seconds == pytest.approx([0.1 + 2e-3 * tokens for tokens in table.tokens])
    assert table.spread_s == pytest.approx([0.0] * 4, abs=1e-6)
    # The one new token behind the cached blocks is computed.
    assert table.base_s == pytest.approx(0.1 + 2e-3, abs=1e-5)
    assert table.hit_s_per_token == pytest.approx(1e-5, rel=1e-3)


def test_every_cold_prompt_is_cold_and_every_cached_one_is_cached(engine: KnownEngine) -> None:
    times = measure(engine, [64, 100], 2, 1e6, lambda *report: None)
    assert [(each.num_tokens, len(each.cold_s), len(each.cached_s)) for each in times] == [(64, 2, 2), (100, 2, 2)]
    assert [each.cached_tokens for each in times] == [64, 96]
    colds = engine.prompts[WARM_UP_RUNS::2]
    assert len({prompt[:BLOCK_TOKENS] for prompt in colds}) == len(colds) == 4


def test_progress_reaches_its_total(engine: KnownEngine) -> None:
    reports: list[tuple[str, int, int]] = []
    measure(engine, [64, 128], 2, 1e6, lambda *report: reports.append(report))
    assert reports[0] == ("measure", 0, 4)
    assert reports[-1] == ("measure", 4, 4)


def test_repeats_end_when_the_time_is_over(engine: KnownEngine) -> None:
    times = measure(engine, [64, 128], 1_000, 3.0, lambda *report: None)
    assert 1 < len(times[0].cold_s) < 10
    assert len(times[0].cold_s) - len(times[1].cold_s) in (0, 1)
    assert engine.now_s < 4.0


def test_time_that_is_over_before_all_lengths_ran_is_an_error(engine: KnownEngine) -> None:
    with pytest.raises(ProfileError, match="2 s were over before every length had run; give shorter --lengths"):
        measure(engine, [64, 2048, 4096], 3, 2.0, lambda *report: None)


def test_noise_never_makes_the_table_fall() -> None:
    times = [LengthTimes(64, [0.2, 0.3, 0.9]), LengthTimes(128, [0.1, 0.2, 0.2]), LengthTimes(256, [0.4])]
    table = table_from(times, **DESCRIPTION)
    assert table.seconds == (0.3, 0.3, 0.4)
    assert table.spread_s == (0.7, 0.1, 0.0)
    assert (table.base_s, table.hit_s_per_token) == (0.0, 0.0)


@given(
    st.lists(
        st.tuples(st.integers(0, 8192), st.floats(0, 10)), min_size=2, max_size=8, unique_by=lambda point: point[0]
    )
)
def test_line_is_numpys_least_squares_unless_it_would_be_negative(points: list[tuple[float, float]]) -> None:
    xs, ys = np.array(points).T
    slope, intercept = np.polyfit(xs, ys, 1)
    if slope >= 0 and intercept >= 0:
        assert fitted_line(points) == pytest.approx((intercept, slope), rel=1e-5, abs=1e-7)
    assert min(fitted_line(points)) >= 0


def test_line_through_fewer_than_two_places_is_level() -> None:
    assert fitted_line([]) == (0.0, 0.0)
    assert fitted_line([(32, 0.2), (32, 0.4)]) == pytest.approx((0.3, 0.0))


def test_table_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    table = table_from([LengthTimes(1, [0.1]), LengthTimes(2, [0.2])], **DESCRIPTION)
    write_table(table, path)
    assert PrefillTable.model_validate_json(path.read_text()) == table

    def fail(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("serve_app.measure_profile.os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_table(table.model_copy(update={"model": "other"}), path)
    assert PrefillTable.model_validate_json(path.read_text()) == table
    assert list(tmp_path.iterdir()) == [path]


def test_file_is_checked_before_minutes_are_spent(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    measure_profile.check_writable(path, force=False)
    path.touch()
    measure_profile.check_writable(path, force=True)
    with pytest.raises(ProfileError, match="exists; give --force"):
        measure_profile.check_writable(path, force=False)
    with pytest.raises(ProfileError, match="there is no directory"):
        measure_profile.check_writable(tmp_path / "none" / "table.json", force=False)
    with pytest.raises(ProfileError, match="is a directory; give --out the name of a file"):
        measure_profile.check_writable(tmp_path, force=True)


def test_directory_without_permission_is_refused_before_minutes_are_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions don't bind root, whom the tests may run as.
    monkeypatch.setattr("serve_app.measure_profile.os.access", lambda path, mode: False)
    with pytest.raises(ProfileError, match=f"{tmp_path} is not writable; give another --out"):
        measure_profile.check_writable(tmp_path / "table.json", force=True)


def test_error_of_vllm_is_told_in_one_line() -> None:
    assert one_line(ValueError("1 validation error\n  max_model_len\n  is 9032")) == (
        "1 validation error max_model_len is 9032"
    )
    assert one_line(RuntimeError()) == "RuntimeError"
    cut = one_line(ValueError("x" * 10_000))
    assert (len(cut), cut[-4:]) == (MAX_ERROR_CHARACTERS, "x...")


def test_measured_table_says_what_was_measured_where_and_when(tmp_path: Path, engine: KnownEngine) -> None:
    described = {"device": "2 cores of X", "model": "m", "dtype": "bfloat16", "vllm_version": "0.29.0"}
    write_table(table_from(measure(engine, [64, 96], 2, 1e6, lambda *report: None), **described), tmp_path / "t.json")
    written = json.loads((tmp_path / "t.json").read_text())
    assert {name: written[name] for name in described} == described
    assert datetime.now(UTC).date() - date.fromisoformat(written["date"]) <= timedelta(days=1)
    assert written["tokens"] == [64, 96]
    assert len(written["seconds"]) == len(written["spread_s"]) == 2


def test_committed_profile_of_the_cpu_is_a_measured_table() -> None:
    path = Path(__file__).resolve().parents[1] / "configs" / "profiles" / "cpu-smollm2-135m.json"
    table = PrefillTable.model_validate_json(path.read_text())
    assert table.derived == ""
    assert table.vllm_version == "0.29.0"
    assert len(table.spread_s) == len(table.tokens)
    assert 0 < table.base_s < table.seconds[0]


@pytest.mark.model
def test_real_engine_is_measured_and_prefix_hits_are_cheaper(model_directory: Path) -> None:
    engine = measure_profile.VllmEngine(str(model_directory), max_model_len=512)
    try:
        prompt = [random.Random(1).randrange(engine.num_vocabulary) for _ in range(256)]
        assert engine.prefill(prompt) == 0
        assert engine.prefill([*prompt, 5]) == 256
        times = measure(engine, [64, 256], 1, 300.0, lambda *report: None)
    finally:
        engine.stop()
    assert [each.cached_tokens for each in times] == [64, 256]
    assert times[1].cached_s[0] < times[1].cold_s[0]
    assert engine.dtype == "float16"
    assert engine.vllm_version == "0.29.0"
