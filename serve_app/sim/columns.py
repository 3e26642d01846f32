"""The requests of one run as columns: what a grid keeps on disk for each run, and what rows and plots are made from.

Cost: O(n log n) to sort n requests once, O(n) for everything else.
"""

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serve_app.sim.whole_file import whole_file

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Served:
    """One finished request."""

    request_id: str
    replica_id: str
    phase: str
    """The phase in which it arrived."""
    arrival_s: float
    """Virtual seconds since the start of the run."""
    ttft_s: float
    """Seconds from arrival to the end of the engine step that sampled the first token."""
    latency_s: float
    """Seconds from arrival to the end of the engine step that sampled the last token."""
    prompt_tokens: int
    cached_tokens: int
    """Prefix hit in tokens, as the engine counted it at first admission; at most `prompt_tokens`."""
    output_tokens: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Arrays of one length n, by arrival and then request id: two runs on the same arrivals line up index by index."""

    arrival_s: FloatArray
    ttft_s: FloatArray
    latency_s: FloatArray
    prompt_tokens: IntArray
    cached_tokens: IntArray
    output_tokens: IntArray
    replica: IntArray
    """Index into `replicas`."""
    phase: IntArray
    """Index into `phases`."""
    replicas: tuple[str, ...]
    """All replicas that are known, those that served nothing included."""
    phases: tuple[str, ...]
    """In order of their first arrivals."""

    def __post_init__(self) -> None:
        """Raises ValueError on columns of different lengths and on an index without a name."""
        for name in COLUMNS:
            length = len(getattr(self, name))
            if length != len(self):
                raise ValueError(f"{name} has {length} values; it must have {len(self)} as arrival_s has")
        for name, names in (("replica", self.replicas), ("phase", self.phases)):
            codes: IntArray = getattr(self, name)
            if len(codes) and not 0 <= codes.min() <= codes.max() < len(names):
                raise ValueError(f"{name} goes from {codes.min()} to {codes.max()}; there are {len(names)} names")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def of_phase(self, phase: str) -> "Columns":
        """Only the requests that arrived in this phase."""
        mask = self.phase == self.phases.index(phase)
        kept = {name: getattr(self, name)[mask] for name in COLUMNS}
        return Columns(**kept, replicas=self.replicas, phases=self.phases)


NAMES = ("replicas", "phases")
COLUMNS = tuple(field.name for field in fields(Columns) if field.name not in NAMES)


def columns(served: Sequence[Served], replica_ids: Sequence[str] = ()) -> Columns:
    """Sort finished requests into columns; `replica_ids` come first, others as numbers in their names order them."""
    ordered = sorted(served, key=lambda one: (one.arrival_s, one.request_id))
    used = sorted({one.replica_id for one in ordered}, key=_by_number)
    replicas = tuple(dict.fromkeys([*replica_ids, *used]))
    phases = tuple(dict.fromkeys(one.phase for one in ordered))
    replica_codes = {name: code for code, name in enumerate(replicas)}
    phase_codes = {name: code for code, name in enumerate(phases)}
    return Columns(
        arrival_s=np.array([one.arrival_s for one in ordered], dtype=np.float64),
        ttft_s=np.array([one.ttft_s for one in ordered], dtype=np.float64),
        latency_s=np.array([one.latency_s for one in ordered], dtype=np.float64),
        prompt_tokens=np.array([one.prompt_tokens for one in ordered], dtype=np.int64),
        cached_tokens=np.array([one.cached_tokens for one in ordered], dtype=np.int64),
        output_tokens=np.array([one.output_tokens for one in ordered], dtype=np.int64),
        replica=np.array([replica_codes[one.replica_id] for one in ordered], dtype=np.int64),
        phase=np.array([phase_codes[one.phase] for one in ordered], dtype=np.int64),
        replicas=replicas,
        phases=phases,
    )


def save_columns(path: Path, columns: Columns) -> None:
    """Write a compressed .npz file, whole or not at all; the same columns give the same bytes."""
    arrays: dict[str, npt.NDArray[np.generic]] = {name: getattr(columns, name) for name in COLUMNS}
    arrays |= {name: np.array(getattr(columns, name), dtype=np.str_) for name in NAMES}
    with whole_file(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_columns(path: Path) -> Columns:
    """Read what `save_columns` wrote.

    Raises:
        OSError: there is no such file.
        ValueError: it is no such file, or lacks a column.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*COLUMNS, *NAMES)}
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no columns of a run: {error}") from error
    return Columns(**{**arrays, **{name: tuple(arrays[name].tolist()) for name in NAMES}})


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts "replica-10" behind "replica-9"."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", name)]
