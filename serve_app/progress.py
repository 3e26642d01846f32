"""Progress of a long command: live bars on a terminal, one line for each finished phase elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class PhaseProgress:
    """A context manager that is called as `report(phase, done, total)`; total is 0 while it is unknown.

    A phase begins at its first call and ends when `done` reaches a known `total`.
    """

    def __init__(self, amount: Callable[[int], str], console: Console | None = None) -> None:
        """`amount` turns a count of whatever is counted into words, for example bytes into "269 MB"."""
        self._amount = amount
        self._console = console or Console(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[amount]:>9}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._started_s: dict[str, float] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> "PhaseProgress":
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._started_s[phase] = time.monotonic()
            self._tasks[phase] = self._bars.add_task(phase, total=None, amount="")
        amount = self._amount(done) if done else ""
        self._bars.update(self._tasks[phase], completed=done, total=total or None, amount=amount)
        if 0 < total <= done and phase not in self._ended:
            self._ended.add(phase)
            self._say_ended(phase, total)

    def _say_ended(self, phase: str, total: int) -> None:
        if not self._console.is_terminal:
            elapsed_s = time.monotonic() - self._started_s[phase]
            self._console.print(f"{phase:<9} {self._amount(total):>9} {elapsed_s:6.1f} s", highlight=False)


def megabytes(size_bytes: int) -> str:
    """Decimal megabytes, as file managers show them."""
    return f"{size_bytes / 1e6:,.0f} MB"
