"""What an experiment is: scenarios under policies, and what was to be shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.sim.chosen import Policies
from serve_app.sim.grid import Case, Scenario
from serve_app.sim.metrics import Row
from serve_app.sim.report import Target
from serve_app.sim.scenarios.sizing import BLOCK_SIZE_TOKENS

COMMON_APPROXIMATIONS = (
    "TTFT leaves out HTTP, tokenising and the network (all numbers).",
    "Step times are derived from data sheets, not measured on a GPU, and a step is scheduled when the one before it "
    "has ended (all times; ratios within a scenario suffer less).",
    f"KV blocks hold {BLOCK_SIZE_TOKENS} tokens where GPU engines have 16 by default (hit rates, by under a point).",
)

RECORDED_PARTS: Mapping[str, int] = {"conversation": 6, "synthetic": 2}
"""Mooncake's trace -> how many parts that begin 600 s apart have enough requests for an experiment, one for each seed;
further seeds begin at the first again."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose of an experiment."""

    seed: int = 0
    """Of the first trace, at least 0; further traces count on from it."""
    traces: int | None = None
    """Traces of each kind, at least 1; None: as many as the experiment was designed for."""
    data: Path | None = None
    """Folder of the recorded data; without it the scenarios that need it are left out."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
        if self.traces is not None and self.traces < 1:
            raise ValueError(f"traces is {self.traces}; it must be at least 1")

    def seeds(self, designed: int) -> range:
        """The seeds of the traces."""
        return range(self.seed, self.seed + (self.traces or designed))


Rows = Sequence[Row]
ALL_DECISIONS = ("ordering", "eviction", "router")


@dataclass(frozen=True, slots=True)
class Experiment:
    """One entry of `fairway-serve simulate`."""

    name: str
    description: str
    """One sentence."""
    cases: Callable[[Options], list[Case]]
    """Sorted by scenario."""
    targets: Callable[[Rows], list[Target]] = lambda rows: []
    """What was to be shown, from the rows."""
    approximations: Sequence[str] = ()
    """All of them, the common ones included."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    decisions: Sequence[str] = ALL_DECISIONS
    """What is compared; the product's defaults in these are marked, whatever the others are."""


def each(scenarios: Sequence[Scenario], policies: Sequence[Policies]) -> list[Case]:
    """Every scenario under every set of policies."""
    return [Case(scenario, one) for scenario in scenarios for one in policies]


def suffix(options: Options, seed: int, designed: int = 1) -> str:
    """What tells several traces apart; a single one has the plain name. Args: designed: traces by default."""
    return f"-seed{seed}" if len(options.seeds(designed)) > 1 else ""
