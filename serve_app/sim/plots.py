"""Plots of runs on the same arrivals, as one HTML file that fetches nothing.

For each scenario: TTFT over time (rolling median and p99, phases shaded), the distribution of TTFT, p50, p99 and hit
rate by phase, and what each replica was given over time. At most `MAX_POINTS` points a trace, however long the run.

Importing this module imports plotly, which takes a while: do it only where a plot is wanted.

Cost: O(n log n) a run of n requests, plus plotly.js (about 5 MB) once a file.
"""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from serve_app.sim.columns import Columns, FloatArray, IntArray
from serve_app.sim.metrics import phase_rows
from serve_app.sim.whole_file import whole_file

MAX_POINTS = 2_000
ROLLING_POINTS = 500
MIN_WINDOW = 20
MAX_BINS = 120
LEAST_TTFT_S = 1e-4
"""A logarithmic axis has no zero."""
COLOURS: tuple[str, ...] = (*qualitative.D3, *qualitative.Set2)
SHADES = ("#e8eef7", "#fdf3dc", "#fae3e0", "#e7f3e6")
HEIGHT_PX = 420

Runs = Mapping[str, Columns]
"""What a run is to be called, usually its policies -> its requests."""


def write_html(path: Path, title: str, scenarios: Mapping[str, Runs]) -> None:
    """Write `page`, whole or not at all."""
    text = page(title, scenarios)
    with whole_file(path) as file:
        file.write(text.encode())


def page(title: str, scenarios: Mapping[str, Runs]) -> str:
    """A self-contained page; `scenarios`: scenario -> runs on the same arrivals. The same runs give the same text."""
    parts = ['<!doctype html><html lang="en"><head><meta charset="utf-8">', f"<title>{escape(title)}</title></head>"]
    parts.append(f'<body style="font-family: sans-serif"><h1>{escape(title)}</h1>')
    with_library = True
    for number, (scenario, runs) in enumerate(scenarios.items()):
        parts.append(f"<h2>{escape(scenario)}</h2>")
        for name, figure in figures(runs):
            parts.append(figure.to_html(full_html=False, include_plotlyjs=with_library, div_id=f"{name}-{number}"))
            with_library = False
    return "\n".join([*parts, "</body></html>", ""])


def figures(runs: Runs) -> Iterator[tuple[str, go.Figure]]:
    """(name, figure) of every plot of one scenario, runs without requests left out."""
    filled = {label: run for label, run in runs.items() if len(run)}
    if filled:
        yield "ttft-over-time", ttft_over_time(filled)
        yield "ttft-distribution", ttft_distribution(filled)
        yield "bars", bars(filled)
        yield "replica-load", replica_load(filled)


def ttft_over_time(runs: Runs) -> go.Figure:
    """Rolling median (solid) and p99 (dashed) of each run, by arrival."""
    figure = go.Figure()
    for number, (label, run) in enumerate(runs.items()):
        at_s, median_s, p99_s = rolling(run.arrival_s, run.ttft_s)
        for values, what, dash in ((median_s, "median", "solid"), (p99_s, "p99", "dash")):
            line = {"color": _colour(number), "dash": dash}
            figure.add_scatter(x=at_s, y=values, name=f"{label}, {what}", legendgroup=label, mode="lines", line=line)
    for number, (phase, first_s, last_s) in enumerate(phase_spans(next(iter(runs.values())))):
        shade = {"fillcolor": SHADES[number % len(SHADES)], "opacity": 0.6, "layer": "below", "line_width": 0}
        figure.add_vrect(x0=first_s, x1=last_s, annotation_text=phase, annotation_position="top left", **shade)
    _describe(figure, "TTFT over time", "arrival (s)", "TTFT (s)")
    return figure


def ttft_distribution(runs: Runs) -> go.Figure:
    """Share of requests with at most this TTFT; one step a request, or a quantile where there are too many."""
    figure = go.Figure()
    for number, (label, run) in enumerate(runs.items()):
        ttft_s, share = distribution(run.ttft_s)
        line = {"color": _colour(number)}
        figure.add_scatter(x=ttft_s, y=share, name=label, mode="lines", line=line)
    _describe(figure, "Distribution of TTFT", "TTFT (s, logarithmic)", "share of requests")
    figure.update_xaxes(type="log")
    return figure


def bars(runs: Runs) -> go.Figure:
    """Median and p99 of TTFT and the hit rate of each run, one bar a phase."""
    panels = {"ttft_p50_s": "median TTFT (s)", "ttft_p99_s": "p99 TTFT (s)", "hit_rate": "hit rate (of prompt tokens)"}
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels.values()))
    rows = {label: {row["phase"]: row for row in phase_rows(run, 1)} for label, run in runs.items()}
    phases = dict.fromkeys(phase for by_phase in rows.values() for phase in by_phase)
    for column, field in enumerate(panels, start=1):
        for number, phase in enumerate(phases):
            values = [by_phase[phase][field] if phase in by_phase else None for by_phase in rows.values()]
            look = {"marker_color": _colour(number), "legendgroup": phase, "showlegend": column == 1}
            figure.add_bar(x=list(runs), y=values, name=phase, row=1, col=column, **look)
    _describe(figure, "By phase of arrival", None, None)
    return figure


def replica_load(runs: Runs) -> go.Figure:
    """Prompt tokens to compute that each replica was given, by time of arrival; one panel a run, one colour scale."""
    figure = make_subplots(rows=len(runs), cols=1, subplot_titles=list(runs), shared_xaxes=True)
    for number, (_, run) in enumerate(runs.items(), start=1):
        start_s, tokens = load_by_replica(run)
        figure.add_heatmap(x=start_s, y=list(run.replicas), z=tokens, coloraxis="coloraxis", row=number, col=1)
    _describe(figure, "Prompt tokens to compute, by replica and time of arrival", None, None)
    figure.update_xaxes(title_text="arrival (s)", row=len(runs), col=1)
    num_replicas = max(len(run.replicas) for run in runs.values())
    figure.update_layout(
        height=120 + len(runs) * (60 + 24 * num_replicas),
        coloraxis={"colorscale": "Viridis", "colorbar": {"title": {"text": "tokens"}}},
    )
    return figure


def rolling(arrival_s: FloatArray, ttft_s: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Median and p99 of a window of a hundredth of all requests, at least `MIN_WINDOW`, moved over them.

    arrival_s, ttft_s: (n,), by arrival, n >= 1.
    Returns: arrival of the window's middle request, median, p99; (m,) each, m <= `ROLLING_POINTS`.
    """
    width = min(len(ttft_s), max(MIN_WINDOW, len(ttft_s) // 100))
    starts = _spread(len(ttft_s) - width + 1, ROLLING_POINTS)
    windows = np.lib.stride_tricks.sliding_window_view(ttft_s, width)[starts]
    median_s, p99_s = np.percentile(windows, (50, 99), axis=1)
    return arrival_s[starts + width // 2], median_s, p99_s


def distribution(ttft_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sorted values, at most `MAX_POINTS` of them with the least and the greatest, and the share up to each."""
    ordered: FloatArray = np.maximum(np.sort(ttft_s), LEAST_TTFT_S)
    kept = _spread(len(ordered), MAX_POINTS)
    share: FloatArray = (kept + 1) / len(ordered)
    return ordered[kept], share


def load_by_replica(run: Columns) -> tuple[FloatArray, FloatArray]:
    """Start of each time bin, (bins,), and the tokens that each replica was given in it, (replicas, bins)."""
    first_s, last_s = float(run.arrival_s[0]), float(run.arrival_s[-1])
    num_bins = max(1, min(MAX_BINS, MAX_POINTS // max(1, len(run.replicas)), len(run)))
    width_s = (last_s - first_s) / num_bins or 1.0
    bins = np.minimum(((run.arrival_s - first_s) / width_s).astype(np.int64), num_bins - 1)
    tokens: FloatArray = np.zeros((len(run.replicas), num_bins))
    np.add.at(tokens, (run.replica, bins), run.prompt_tokens - run.cached_tokens)
    start_s: FloatArray = first_s + width_s * np.arange(num_bins, dtype=np.float64)
    return start_s, tokens


def phase_spans(run: Columns) -> list[tuple[str, float, float]]:
    """(phase, first arrival, last arrival); none where there is only one phase."""
    if len(run.phases) < 2:
        return []
    arrivals_s = {phase: run.of_phase(phase).arrival_s for phase in run.phases}
    return [(phase, float(at_s[0]), float(at_s[-1])) for phase, at_s in arrivals_s.items()]


def _spread(length: int, most: int) -> IntArray:
    """At most `most` indices below `length`, evenly apart, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(np.int64))


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _describe(figure: go.Figure, title: str, x: str | None, y: str | None) -> None:
    figure.update_layout(title=title, template="plotly_white", height=HEIGHT_PX)
    if x and y:
        figure.update_xaxes(title_text=x)
        figure.update_yaxes(title_text=y, rangemode="tozero")
