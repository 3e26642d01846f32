"""The page docs/results.md: one section an experiment, from its committed JSON and its commentary written by hand."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from results_references import resolved

from serve_app.sim.metrics import Row
from serve_app.sim.report import Results, read_json
from serve_app.sim.summary import SUMMARY_SHOWN, family_rows, has_families
from serve_app.sim.tables import MAX_TARGETS, SHOWN, markdown, targets_table, text_table

EXPERIMENTS = (
    "dynamic",
    "scenarios",
    "flood",
    "ablation",
    "long-prefill",
    "weak-spot",
    "decode",
    "evict-worst",
    "evict-mixed",
    "evict-protect",
    "gsp",
    "chat",
    "longdoc",
    "trace",
    "sweep",
    "joint",
    "defaults",
    "faults",
)
"""The order of the sections; what is not named here follows by name."""
ROUTING = (
    "scenario",
    "phase",
    "ordering",
    "eviction",
    "router",
    "requests",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "latency_p50_s",
    "hit_rate",
    "load_max_over_mean",
    "starved",
)
SHOWN_OF: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("gsp", "chat", "longdoc", "trace", "sweep", "joint", "defaults", "faults"), ROUTING),
    "decode": (*SHOWN, "tpot_p99_s", "latency_p50_s"),
}
"""Experiments whose table has other columns than `SHOWN`."""
OPEN_ROWS = 48
"""Longer tables are folded."""
MAX_ROWS = 400
"""Still longer ones are cut; the JSON has them all."""
OWN_LINES = ("description", "command", "cpu_s")
"""Parameters with a place of their own in a section."""
NOTHING_MEASURED = Results("", 0, {}, {}, ())
HEAD = """<!-- Made by scripts/results from docs/results; change those, not this file. -->

# Results

What each experiment of `fairway-serve simulate` measured, in virtual time: vLLM's real scheduler and KV cache manager
and our real router, with the forward pass modelled and the network taking no time. Every section names its
approximations. All policies of a scenario see the same arrivals. p50, p95, p99 and max are of TTFT; the words are
defined in [metrics.md](metrics.md). Starved requests have a TTFT above 3x the p99 that FCFS has on the same arrivals. A
ratio to LPM or FCFS is taken within a trace; of several traces the median is shown.
"""


def page(directory: Path) -> str:
    """The whole page from the .json and .md files of a directory; a commentary without results is a section too.

    Raises:
        OSError: a file cannot be read.
        ValueError: a JSON file is no results, or a commentary refers to a number that is not in them; names the file.
    """
    names = {path.stem for path in (*directory.glob("*.json"), *directory.glob("*.md")) if path.stem != "README"}
    order = [name for name in EXPERIMENTS if name in names] + sorted(names - set(EXPERIMENTS))
    files = {name: directory / f"{name}.json" for name in order}
    results = {name: read_json(path) for name, path in files.items() if path.exists()}
    sections = [_section(name, results.get(name), directory / f"{name}.md") for name in order]
    return "\n".join([HEAD, _contents(order, results), *sections]).rstrip() + "\n"


def _contents(order: Sequence[str], results: Mapping[str, Results]) -> str:
    if not order:
        return "No results are committed yet.\n"
    links = [f"[{name}](#{name})" for name in order]
    total_s = sum(_cpu_s(one) for one in results.values())
    total = f"\n\nTheir runs took {duration(total_s)} of CPU time." if total_s else ""
    return f"Experiments: {', '.join(links)}.{total}\n"


def _section(name: str, results: Results | None, commentary: Path) -> str:
    text = commentary.read_text().strip() if commentary.exists() else ""
    try:
        text = resolved(text, results or NOTHING_MEASURED)
    except ValueError as error:
        raise ValueError(f"{commentary}: {error}") from error
    said = [text] if text else []
    if results is None:
        return "\n\n".join([f"## {name}", *said, ""])
    return "\n\n".join([f"## {name}", *_what_it_is(results), *said, *_tables(name, results), *_how(results), ""])


def _what_it_is(results: Results) -> Iterator[str]:
    if description := results.parameters.get("description"):
        yield str(description)
    command = results.parameters.get("command") or f"fairway-serve simulate {results.experiment} --seed {results.seed}"
    yield f"```\n{command}\n```"


def _tables(name: str, results: Results) -> Iterator[str]:
    if has_families(results.rows):
        yield markdown(text_table(family_rows(results.rows, results.targets), SUMMARY_SHOWN))
        yield f"The {len(results.rows):,} rows of single traces and phases are in [{name}.json](results/{name}.json)."
    else:
        yield from _rows(name, results.rows)
    if results.targets:
        met = sum(target.met for target in results.targets)
        yield f"Targets met: {met:,} of {len(results.targets):,}."
        if len(results.targets) <= MAX_TARGETS:
            yield markdown(targets_table(results.targets))


def _rows(name: str, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    table = markdown(text_table(rows[:MAX_ROWS], SHOWN_OF.get(name, SHOWN)))
    if len(rows) <= OPEN_ROWS:
        yield table
    else:
        yield f"<details><summary>{min(len(rows), MAX_ROWS)} rows</summary>\n\n{table}\n\n</details>"
    if len(rows) > MAX_ROWS:
        yield f"All {len(rows):,} rows are in [{name}.json](results/{name}.json)."


def _how(results: Results) -> Iterator[str]:
    """Everything that another run needs, and how far the numbers can be trusted."""
    if results.approximations:
        yield "Approximations:\n\n" + "\n".join(f"- {sentence}" for sentence in results.approximations)
    shown = [f"{name} {_value(value)}" for name, value in results.parameters.items() if name not in OWN_LINES]
    versions = [f"{name} {version}" for name, version in results.versions.items()]
    took = [f"The runs took {duration(_cpu_s(results))} of CPU time."] if _cpu_s(results) else []
    yield " ".join([f"Seed {results.seed}; {', '.join([*shown, *versions])}.", *took])


def _cpu_s(results: Results) -> float:
    """Of all runs; of a grid that was resumed, those that were finished before included."""
    value = results.parameters.get("cpu_s")
    return float(value) if isinstance(value, int | float) else 0.0


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {_value(each)}" for name, each in value.items()) + ")"
    if isinstance(value, list):
        return "(" + ", ".join(map(_value, value)) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def duration(elapsed_s: float) -> str:
    """Seconds below two minutes, minutes below two hours, hours and minutes above."""
    if elapsed_s < 120:
        return f"{elapsed_s:.0f} s"
    minutes = round(elapsed_s / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
