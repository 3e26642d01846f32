"""What is compared: the routers, the cells of the grid, in which order they are run, and where a cell's result is kept.

A cell is one router at one rate with one seed in one state of the cluster. Cells are run in visits: a cluster in which
nothing was served yet gets one seed's requests (the fresh cell of that seed), and then those of its partner seed (the
used cell of the partner). Pure; cost O(cells).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from serve_app.config import RoutingDocument
from serve_app.emulation.settings import EmulationSettings
from serve_app.sim.arrivals import GspParams

SystemName = Literal["app", "stock", "ours-inside"]
"""Our whole app; plain vLLM servers behind sglang-router, with vLLM's scheduler or with ours."""
State = Literal["fresh", "used"]
STATES: tuple[State, ...] = get_args(State)
NUM_GROUPS = 32
RATES_PER_S = (17.0, 20.0, 24.0)
SEEDS = (0, 1)
MAX_STEP_TOKENS = 2_048
MAX_MODEL_TOKENS = 8_192
"""SmolLM2's positions."""
ENGINE: Mapping[str, Any] = {
    "enforce_eager": True,
    "block_size": 16,
    "max_model_len": MAX_MODEL_TOKENS,
    "max_num_batched_tokens": MAX_STEP_TOKENS,
    "enable_prompt_tokens_details": True,
}
"""vLLM's arguments, alike in every engine."""


@dataclass(frozen=True, slots=True)
class Router:
    """One row of the comparison."""

    name: str
    system: SystemName
    rule: str = ""
    """The rule of our router; empty for sglang-router."""
    options: tuple[str, ...] = ()
    """sglang-router's options beside addresses and logs."""
    inside: str = "fairway-carried, adaptive"
    """What orders and evicts in the engines."""

    @property
    def learns(self) -> bool:
        """Whether the router keeps something learned that no reset takes away: LBGR's regression alone."""
        return self.rule == "lbgr"


def _sglang(name: str, threshold: float, system: SystemName, inside: str) -> Router:
    options = ("--policy", "cache_aware", "--cache-threshold", str(threshold))
    return Router(name, system, options=options, inside=inside)


_ALL = (
    *(Router(rule, "app", rule=rule) for rule in get_args(RoutingDocument.model_fields["router"].annotation)),
    _sglang("sglang-0.3", 0.3, "stock", "FCFS, LRU (stock vLLM)"),
    _sglang("sglang-0.5", 0.5, "stock", "FCFS, LRU (stock vLLM)"),
    _sglang("sglang-0.3-ours-inside", 0.3, "ours-inside", "fairway-carried, adaptive"),
)
ROUTERS: Mapping[str, Router] = {router.name: router for router in _ALL}
"""By name. sglang-router 0.3.2 is shipped with the threshold 0.3; its other options are left as shipped."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the runs are."""

    requests: int = 512
    """Requests of a cell, a multiple of 32, the groups."""
    time_scale: float = 2.0
    """Steps take this many times as long and arrivals come this many times as slowly, above 0."""
    engines: int = 4
    """Engines behind the router, 1 to 100."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        if self.requests < NUM_GROUPS or self.requests % NUM_GROUPS:
            raise ValueError(f"requests is {self.requests}; it must be a multiple of {NUM_GROUPS}, at least one")
        if not 0.0 < self.time_scale <= 1_000.0:
            raise ValueError(f"time_scale is {self.time_scale}; it must be above 0 and at most 1000")
        if not 1 <= self.engines <= 100:
            raise ValueError(f"engines is {self.engines}; it must be from 1 to 100")

    @property
    def emulation(self) -> EmulationSettings:
        """5 ms + 0.1 ms a token, 1,152 KV blocks of 16 tokens: the defaults, slowed down."""
        return EmulationSettings(time_scale=self.time_scale)

    def workload(self, rate_per_s: float) -> GspParams:
        """The requests, in emulated seconds."""
        per_group = self.requests // NUM_GROUPS
        return GspParams(num_groups=NUM_GROUPS, prompts_per_group=per_group, rate_per_s=rate_per_s)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    router: str
    rate_per_s: float
    seed: int
    state: State


@dataclass(frozen=True, slots=True)
class Visit:
    """What is served, one after the other, from a fresh cluster on."""

    router: str
    rate_per_s: float
    first_seed: int
    fresh: Cell | None
    """None where the first seed's requests only make the cluster a used one."""
    used: Cell | None
    """None where nothing follows."""


def partner(seed: int) -> int:
    """The seed whose requests were served before `seed`'s in a used cluster: 0 and 1, 2 and 3, and so on."""
    return seed ^ 1


def grid(routers: Iterable[str], rates: Iterable[float], seeds: Iterable[int], states: Iterable[State]) -> list[Cell]:
    """All cells of the product, without repeats."""
    rates, seeds, states = list(rates), list(seeds), list(states)
    product = (
        Cell(name, rate, seed, state) for name in routers for rate in rates for seed in seeds for state in states
    )
    return list(dict.fromkeys(product))


def visits(cells: Sequence[Cell]) -> list[Visit]:
    """The fewest visits that measure all cells: by system, router and first seed, the rates innermost.

    So with two rates or more no visit begins with requests that the last one ended with, and nothing that an engine may
    remember of them recurs.
    """
    wanted = set(cells)
    places = {(c.router, c.seed if c.state == "fresh" else partner(c.seed), c.rate_per_s) for c in wanted}
    systems, names = get_args(SystemName), list(ROUTERS)
    order = sorted(
        places, key=lambda place: (systems.index(ROUTERS[place[0]].system), names.index(place[0]), *place[1:])
    )
    return [
        Visit(router, rate, first, *(cell if cell in wanted else None for cell in both))
        for router, first, rate in order
        for both in [(Cell(router, rate, first, "fresh"), Cell(router, rate, partner(first), "used"))]
    ]


def settings_of(cell: Cell, scale: Scale, versions: Mapping[str, str]) -> dict[str, Any]:
    """Everything that a cell's result depends on, ready for JSON."""
    router = ROUTERS[cell.router]
    return {
        "cell": asdict(cell),
        "router": asdict(router),
        "requests": scale.requests,
        "time_scale": scale.time_scale,
        "workload": asdict(scale.workload(cell.rate_per_s)),
        "engines": scale.engines,
        "engine": dict(ENGINE),
        "emulation": scale.emulation.model_dump(mode="json"),
        "versions": dict(versions),
    }


def file_name(settings: Mapping[str, Any]) -> str:
    """Name of the cell's file; another setting makes another name, so that an old result is never taken for it."""
    cell = settings["cell"]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return f"{cell['router']}-{cell['rate_per_s']:g}-seed{cell['seed']}-{cell['state']}-{digest}.json"
