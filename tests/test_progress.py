"""Progress of a long command, where nobody watches and where somebody does."""

import io

import pytest
from rich.console import Console

from serve_app.progress import PhaseProgress, megabytes


@pytest.mark.parametrize("terminal", [False, True])
def test_each_phase_is_shown_with_its_amount(terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100)
    with PhaseProgress(megabytes, console) as report:
        report("wait", 0, 0)
        for done in (0, 40_000_000, 93_000_000, 93_000_000):
            report("download", done, 93_000_000)
    assert "download" in screen.getvalue()
    assert "93 MB" in screen.getvalue()


def test_without_a_terminal_a_phase_is_one_line_at_its_end() -> None:
    screen = io.StringIO()
    with PhaseProgress(lambda done: f"{done} runs", Console(file=screen, force_terminal=False)) as report:
        for done in range(4):
            report("measure", done, 3)
        report("measure", 3, 3)
        report("unfinished", 0, 0)
    assert [line.split()[:3] for line in screen.getvalue().splitlines()] == [["measure", "3", "runs"]]
