"""Rows of recorded traces and texts: JSON lines and CSV, plain or .gz, every field checked as it is read.

Errors are ValueError that name the file, the line, the field, its value and its bound. Cost: O(bytes).
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One row, or an object within one."""

    place: str
    """File and line, for messages."""
    fields: Mapping[str, object]

    def integer(self, name: str, least: int) -> int:
        """A whole number of at least `least`; digits count as one, for CSV has nothing else."""
        value = self._value(name)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refused(name, f"a whole number of at least {least}")
        return value

    def number(self, name: str, least: float) -> float:
        """A finite number of at least `least`."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            raise self.refused(name, f"a finite number of at least {least:g}")
        return float(value)

    def text(self, name: str) -> str:
        """A string, perhaps empty."""
        value = self._value(name)
        if not isinstance(value, str):
            raise self.refused(name, "a string")
        return value

    def time_s(self, name: str) -> float:
        """Seconds from an arbitrary origin, out of a date with a time and without a zone."""
        try:
            return (datetime.fromisoformat(self.text(name)) - datetime(2000, 1, 1)).total_seconds()
        except (ValueError, TypeError):
            raise self.refused(name, "a date and a time without a zone") from None

    def integers(self, name: str, least: int) -> list[int]:
        """A list of whole numbers, each at least `least`, perhaps none."""
        values = self._list(name)
        numbers = [value for value in values if type(value) is int and least <= value < 2**63]
        if len(numbers) != len(values):
            raise self.refused(name, f"a list of whole numbers of at least {least}")
        return numbers

    def pairs(self, name: str, least: int) -> list[tuple[int, int]]:
        """A list of pairs of whole numbers, each number at least `least`, perhaps none."""
        pairs = []
        for value in self._list(name):
            if (
                not isinstance(value, list)
                or len(value) != 2
                or any(type(one) is not int or not least <= one < 2**31 for one in value)
            ):
                raise self.refused(name, f"a list of pairs of whole numbers of at least {least}")
            pairs.append((value[0], value[1]))
        return pairs

    def texts(self, name: str) -> list[str]:
        """A list of strings, perhaps none."""
        values = self._list(name)
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) != len(values):
            raise self.refused(name, "a list of strings")
        return texts

    def rows(self, name: str) -> list["Row"]:
        """A list of objects, at least one; their places name their numbers, from 0."""
        values = self._list(name)
        if not values or not all(isinstance(value, dict) for value in values):
            raise self.refused(name, "a list of at least one object")
        return [
            Row(f"{self.place}: {name}[{number}]", value)
            for number, value in enumerate(values)
            if isinstance(value, dict)
        ]

    def refused(self, name: str, bound: str) -> ValueError:
        """The error that says what `name` must be."""
        shown = repr(self.fields.get(name))
        return ValueError(
            f"{self.place}: {name} is {shown if len(shown) <= 80 else shown[:77] + '...'}; it must be {bound}"
        )

    def _value(self, name: str) -> object:
        if name not in self.fields:
            raise ValueError(f"{self.place}: {name} is missing")
        return self.fields[name]

    def _list(self, name: str) -> list[object]:
        value = self._value(name)
        if not isinstance(value, list):
            raise self.refused(name, "a list")
        return value


def json_rows(path: Path) -> Iterator[Row]:
    """One row for each line; empty lines are skipped. Raises ValueError on what is not a JSON object."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: not a JSON object")
        yield Row(f"{path}:{number}", value)


def csv_rows(path: Path) -> Iterator[Row]:
    """One row for each line below the header; empty lines are skipped. A field that a line lacks is missing."""
    header: list[str] | None = None
    for number, line in _lines(path):
        values = next(csv.reader([line]), [])
        if values and header is None:
            header = values
        elif values and header is not None:
            yield Row(f"{path}:{number}", dict(zip(header, values, strict=False)))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path}:{number + 1}: cannot be read: {error}") from None
