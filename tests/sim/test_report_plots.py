"""The page of plots: all runs on it, nothing fetched, and no more points than a browser likes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.sim.columns import Columns, columns
from serve_app.sim.plots import (
    MAX_POINTS,
    ROLLING_POINTS,
    distribution,
    figures,
    load_by_replica,
    page,
    phase_spans,
    rolling,
    write_html,
)
from tests.sim.test_sim_metrics import random_run

RUNS = {
    "fcfs + lru": columns(random_run(0), ["replica-0", "replica-1", "replica-2", "idle"]),
    "ours": columns(random_run(1)),
}


def long_run(size: int) -> Columns:
    rng = np.random.default_rng(0)
    one = np.ones(size, dtype=np.int64)
    arrival_s, ttft_s = np.sort(rng.uniform(0, 600, size)), rng.exponential(1.0, size)
    return Columns(arrival_s, ttft_s, ttft_s, 9 * one, one, one, 0 * one, 0 * one, ("replica-0",), ("all",))


def test_page_holds_every_run_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plots.html"
    write_html(path, "gsp <12>", {"gsp-12": RUNS, "gsp-14": {"only": RUNS["ours"]}})
    text = path.read_text()
    assert text == page("gsp <12>", {"gsp-12": RUNS, "gsp-14": {"only": RUNS["ours"]}})
    assert "<title>gsp &lt;12&gt;</title>" in text
    assert "<h2>gsp-14</h2>" in text
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text)
    calls = re.findall(r'Plotly\.newPlot\(\s*"([\w-]+)",', text)
    assert calls == [
        f"{name}-{number}"
        for number in range(2)
        for name in ("ttft-over-time", "ttft-distribution", "bars", "replica-load")
    ]
    names = re.findall(r'"name":("(?:[^"\\]|\\.)*")', text)
    assert {json.loads(name) for name in names} >= {"fcfs + lru, median", "fcfs + lru, p99", "ours", "spike", "only"}
    # One copy of plotly.js, however many plots.
    assert len(text) < 8_000_000


@pytest.mark.parametrize("size", [1, 2, 19, 20, 21, 5_000, 30_000])
def test_no_trace_has_more_points_than_allowed(size: int) -> None:
    for _, figure in figures({"run": long_run(size)}):
        for trace in figure.data:
            assert 1 <= np.size(trace.z if trace.type == "heatmap" else trace.y) <= MAX_POINTS


def test_every_axis_that_is_not_a_name_has_a_unit() -> None:
    made = dict(figures(RUNS))
    assert [(made[name].layout.xaxis.title.text, made[name].layout.yaxis.title.text) for name in list(made)[:2]] == [
        ("arrival (s)", "TTFT (s)"),
        ("TTFT (s, logarithmic)", "share of requests"),
    ]
    assert [note.text for note in made["bars"].layout.annotations] == [
        "median TTFT (s)",
        "p99 TTFT (s)",
        "hit rate (of prompt tokens)",
    ]
    assert made["replica-load"].layout.xaxis2.title.text == "arrival (s)"


def test_phases_are_shaded_from_their_first_to_their_last_arrival() -> None:
    run = RUNS["ours"]
    spans = phase_spans(run)
    assert [phase for phase, _, _ in spans] == ["calm", "burst", "spike"]
    for code, (_, first_s, last_s) in enumerate(spans):
        arrivals_s = [at_s for at_s, phase in zip(run.arrival_s, run.phase, strict=True) if phase == code]
        assert (first_s, last_s) == (min(arrivals_s), max(arrivals_s))
    shapes = dict(figures(RUNS))["ttft-over-time"].layout.shapes
    assert [(shape.x0, shape.x1) for shape in shapes] == [span[1:] for span in phase_spans(RUNS["fcfs + lru"])]
    assert phase_spans(long_run(10)) == []


def test_rolling_percentiles_are_those_of_each_window() -> None:
    run = long_run(4_000)
    at_s, median_s, p99_s = rolling(run.arrival_s, run.ttft_s)
    assert len(at_s) == ROLLING_POINTS
    for index in (0, 1, 250, ROLLING_POINTS - 1):
        middle = int(np.searchsorted(run.arrival_s, at_s[index]))
        window = run.ttft_s[middle - 20 : middle + 20]
        assert (median_s[index], p99_s[index]) == pytest.approx((np.median(window), np.percentile(window, 99)))


def test_distribution_keeps_both_ends_and_has_no_zero() -> None:
    ttft_s, share = distribution(np.array([3.0, 0.0, 2.0, 1.0]))
    assert ttft_s.tolist() == [1e-4, 1.0, 2.0, 3.0]
    assert share.tolist() == [0.25, 0.5, 0.75, 1.0]
    values = np.random.default_rng(0).exponential(1.0, 10_000)
    ttft_s, share = distribution(values)
    assert (ttft_s[0], ttft_s[-1], share[-1]) == (values.min(), values.max(), 1.0)


def test_load_of_replicas_adds_up_to_all_tokens_and_idle_ones_have_none() -> None:
    run = RUNS["fcfs + lru"]
    start_s, tokens = load_by_replica(run)
    assert tokens.shape == (4, len(start_s))
    todo = run.prompt_tokens - run.cached_tokens
    assert tokens.sum(axis=1).tolist() == [todo[run.replica == code].sum() for code in range(4)]
    last_bin = run.arrival_s >= start_s[-1]
    assert tokens[:, -1].sum() == todo[last_bin].sum()


def test_runs_that_served_nothing_have_no_plot() -> None:
    empty = columns([])
    assert list(figures({"none": empty})) == []
    assert [name for name, _ in figures({"none": empty, "some": RUNS["ours"]})] != []


def test_phases_that_a_run_lacks_have_no_bar() -> None:
    other = replace(RUNS["ours"], phases=("calm", "burst", "drain"))
    made = dict(figures({"ours": RUNS["ours"], "other": other}))["bars"]
    spike = next(trace for trace in made.data if trace.name == "spike")
    assert (spike.y[0] is None, spike.y[1] is None) == (False, True)


def test_rows_and_reports_do_not_pay_for_plotly() -> None:
    code = (
        "import sys, serve_app.sim.report, serve_app.sim.tables, serve_app.sim.summary; print('plotly' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
