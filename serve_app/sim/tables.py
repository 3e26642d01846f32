"""Rows as tables narrow enough to read: chosen fields only, and what all rows have in common is said once."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from serve_app.sim.metrics import ALL_PHASES, Row
from serve_app.sim.report import Target

ABSENT = "-"
DEFAULT_MARK = "*"
DEFAULT_NOTE = "\\* the product's defaults in what is compared"
MAX_TARGETS = 20
WIDEST = 10_000
"""Characters a line; no table of ours comes near."""

Format = Callable[[float], str]


def seconds(value: float) -> str:
    """Three significant digits, never an exponent: 0.00123, 1.23, 123, 12,345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def percent(value: float) -> str:
    """A share from 0 to 1."""
    return f"{100 * value:.1f} %"


def count(value: float) -> str:
    """A whole number, or a mean of such."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def ratio(value: float) -> str:
    """A value over another of the same unit."""
    return f"{value:.2f}"


NAME_FIELDS = ("scenario", "phase", "ordering", "eviction", "router")
FIELDS: Mapping[str, tuple[str, Format]] = {
    "requests": ("requests", count),
    "traces": ("traces", count),
    "traces_met": ("traces meeting all", count),
    "targets_met": ("targets met, mean", count),
    "targets": ("of", count),
    "ttft_p50_s": ("p50 s", seconds),
    "p50_over_lpm": ("/ LPM's", ratio),
    "ttft_p95_s": ("p95 s", seconds),
    "ttft_p99_s": ("p99 s", seconds),
    "p99_over_fcfs": ("/ FCFS's", ratio),
    "ttft_max_s": ("max s", seconds),
    "latency_p50_s": ("latency p50 s", seconds),
    "latency_p95_s": ("latency p95 s", seconds),
    "latency_p99_s": ("latency p99 s", seconds),
    "tpot_p50_s": ("TPOT p50 s", seconds),
    "tpot_p99_s": ("TPOT p99 s", seconds),
    "hit_rate": ("hit rate", percent),
    "load_max_over_mean": ("load max/mean", ratio),
    "starved": ("starved", count),
    "starved_own": ("starved, own rule", count),
}
"""Field of a row -> heading and format. TTFT has no prefix: it is what a table of ours is about."""
SHOWN = (
    *NAME_FIELDS,
    "requests",
    "ttft_p50_s",
    "ttft_p99_s",
    "ttft_max_s",
    "tpot_p50_s",
    "hit_rate",
    "starved",
)


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as text."""

    common: Mapping[str, str]
    """Names that all rows share, and which are therefore no column."""
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    """(rows, columns)."""
    num_names: int
    """The first columns that hold names, to be aligned left."""
    has_default: bool
    """Whether a row is of the product's defaults, which its last name marks."""

    @property
    def caption(self) -> str:
        """What all rows share, and what the mark means."""
        shared = [f"{name} {value}" for name, value in self.common.items() if (name, value) != ("phase", ALL_PHASES)]
        note = [DEFAULT_NOTE] if self.has_default else []
        return "; ".join([", ".join(shared)] * bool(shared) + note)


def text_table(rows: Sequence[Row], shown: Sequence[str] = SHOWN) -> TextTable:
    """Choose and format; rows keep their order, a field that no row has is left out."""
    present = [field for field in shown if any(row.get(field) is not None for row in rows)]
    values = {field: {row.get(field) for row in rows} for field in present if field in NAME_FIELDS}
    common = {field: str(next(iter(found))) for field, found in values.items() if len(found) == 1 and len(rows) > 1}
    names = [field for field in values if field not in common]
    numbers = [field for field in present if field not in values]
    return TextTable(
        common=common,
        header=(*names, *(FIELDS[field][0] if field in FIELDS else field for field in numbers)),
        lines=tuple((*_names(row, names), *(_cell(row, field) for field in numbers)) for row in rows),
        num_names=len(names),
        has_default=any(row.get("default") for row in rows),
    )


def targets_table(targets: Sequence[Target]) -> TextTable:
    """Every target if they are few, otherwise those missed."""
    shown = targets if len(targets) <= MAX_TARGETS else [target for target in targets if not target.met]
    lines = [(one.name, seconds(one.value), seconds(one.bound), "yes" if one.met else "no") for one in shown]
    return TextTable({}, ("target", "value", "bound", "met"), tuple(lines), 1, False)


def markdown(table: TextTable) -> str:
    """A pipe table, its caption above."""
    rule = ["---" if column < table.num_names else "---:" for column in range(len(table.header))]
    lines = [table.header, rule, *([cell.replace("|", "\\|") for cell in line] for line in table.lines)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table.caption[0].upper()}{table.caption[1:]}.\n\n{text}" if table.caption else text


def rich_table(table: TextTable) -> Table:
    """For the terminal; rows of the defaults are bold."""
    made = Table(box=None, pad_edge=False)
    for column, heading in enumerate(table.header):
        made.add_column(Text(heading), justify="left" if column < table.num_names else "right", no_wrap=True)
    for line in table.lines:
        is_default = table.has_default and any(cell.endswith(DEFAULT_MARK) for cell in line[: table.num_names])
        made.add_row(*map(Text, line), style="bold" if is_default else None)
    return made


def show(table: TextTable, file: TextIO | None = None) -> None:
    """Print, by default to stdout, with lines as long as they are: a narrow terminal wraps them, a pipe does not."""
    made = rich_table(table)
    widest = Console(width=WIDEST)
    console = Console(file=file, width=Measurement.get(widest, widest.options, made).maximum)
    console.print(made)
    if table.caption:
        console.print(Text(table.caption.replace("\\", "")), soft_wrap=True)


def as_text(table: TextTable) -> str:
    """What `show` prints into a file."""
    out = StringIO()
    show(table, out)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _names(row: Row, names: Sequence[str]) -> list[str]:
    cells = [str(row.get(name, ABSENT)) for name in names]
    if cells and row.get("default"):
        cells[-1] += f" {DEFAULT_MARK}"
    return cells


def _cell(row: Row, field: str) -> str:
    value = row.get(field)
    if value is None:
        return ABSENT
    if isinstance(value, int | float) and not isinstance(value, bool):
        return FIELDS[field][1](value) if field in FIELDS else seconds(value)
    return str(value)
