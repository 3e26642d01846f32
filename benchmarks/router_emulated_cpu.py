"""How busy this machine's cores are during a run: what decides whether the policy was measured or the cores.

    cpu_busy = (all time - idle - waiting for I/O) / all time, over all cores and whoever used them (proc(5), stat)
    cpu_own  = user and system seconds of this process' descendants / (wall seconds * cores)

`cpu_own` misses processes that began or ended within the run, and those that were orphaned.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_BOUND = 0.7
"""Above this share the cores set the pace."""
_IDLE, _IOWAIT, _GUEST = 3, 4, 8


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Shares of all cores, 0 to 1."""

    cpu_busy: float
    cpu_own: float


@dataclass(frozen=True, slots=True)
class CpuMark:
    """What the kernel's counters said at one moment."""

    at_s: float
    total_ticks: int
    idle_ticks: int
    own_s: dict[int, float]
    """CPU seconds by process id."""


def read_mark() -> CpuMark:
    """The counters now."""
    total, idle = cpu_ticks(Path("/proc/stat").read_text())
    return CpuMark(time.monotonic(), total, idle, {pid: cpu_s(pid) for pid in descendants(os.getpid())})


def use_between(begun: CpuMark, ended: CpuMark) -> CpuUse:
    """Shares between two marks; 0 where no time passed."""
    ticks = max(1, ended.total_ticks - begun.total_ticks)
    busy = 1 - (ended.idle_ticks - begun.idle_ticks) / ticks
    own_s = sum(used_s - begun.own_s[pid] for pid, used_s in ended.own_s.items() if pid in begun.own_s)
    cores_s = max(1e-9, ended.at_s - begun.at_s) * (os.cpu_count() or 1)
    return CpuUse(busy, own_s / cores_s)


def cpu_ticks(stat: str) -> tuple[int, int]:
    """All ticks and idle ones from the text of /proc/stat; guests' ticks are counted as user ticks already."""
    fields = [int(field) for field in stat.splitlines()[0].split()[1:]]
    return sum(fields[:_GUEST]), fields[_IDLE] + fields[_IOWAIT]


def descendants(root: int) -> set[int]:
    """Ids of the process, its children, theirs and so on; a process that ends meanwhile is left out."""
    found, parents = {root}, [root]
    while parents:
        for task in _entries(Path(f"/proc/{parents.pop()}/task")):
            new = {int(child) for child in _text(task / "children").split()} - found
            found |= new
            parents += new
    return found


def cpu_s(pid: int) -> float:
    """User and system seconds of all its threads; 0 for a process that is gone."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
