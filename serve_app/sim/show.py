"""Results on a terminal: the rows, a summary where a family has several traces, and how many targets were met."""

from typing import TextIO

from rich.console import Console

from serve_app.sim.report import Results
from serve_app.sim.summary import SUMMARY_SHOWN, family_rows, has_families
from serve_app.sim.tables import MAX_TARGETS, show, targets_table, text_table


def show_results(results: Results, file: TextIO | None = None) -> None:
    """Print to `file`, by default stdout."""
    if has_families(results.rows):
        show(text_table(family_rows(results.rows, results.targets), SUMMARY_SHOWN), file)
    else:
        show(text_table(results.rows), file)
    console = Console(file=file, highlight=False, soft_wrap=True)
    if results.targets:
        missed = sum(not target.met for target in results.targets)
        console.print(f"\ntargets met: {len(results.targets) - missed} of {len(results.targets)}")
        if len(results.targets) <= MAX_TARGETS or 0 < missed <= MAX_TARGETS:
            show(targets_table(results.targets), file)
    for text in results.approximations:
        console.print(f"approximation: {text}")
