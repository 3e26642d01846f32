"""The one settings model of fairway-serve, validated once and passed down.

`FairwayServeConfig` enters through the application builders' single typed argument; every part receives only its own
sub-model. `EnginePolicy` is also what vLLM's `additional_config["fairway"]` holds, and `RoutingDocument` is the live,
versioned document that the control deployment edits. Unknown fields are errors everywhere.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from serve_app.emulation.settings import EmulationSettings
from serve_app.settings import Settings

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1_000, allow_inf_nan=False)]


class PrefillTable(Settings):
    """A measured table: how long the engine takes to prefill a cold prompt of so many tokens."""

    device: str
    """Where it was measured, for example "2-core x86-64 CPU"."""
    model: str
    """The model that was measured."""
    dtype: str
    """Weights' and activations' type during the measurement."""
    vllm_version: str
    """vLLM that was measured."""
    date: str
    """ISO date of the measurement."""
    derived: str = ""
    """Empty for a measured table; else what it was derived from."""
    tokens: tuple[int, ...] = Field(min_length=2)
    """Prompt lengths, ascending, at least 1."""
    seconds: tuple[float, ...] = Field(min_length=2)
    """Median seconds to the first token for each length, same order, never falling."""
    spread_s: tuple[float, ...] = ()
    """Largest minus smallest of the repeats, for each length; empty when derived."""
    base_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds that a request costs even when all but its last token is cached."""
    hit_s_per_token: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds that each cached prompt token costs (tokenising, look-up, attention over it)."""

    @model_validator(mode="after")
    def _is_a_rising_table(self) -> "PrefillTable":
        if len(self.tokens) != len(self.seconds):
            raise ValueError(f"tokens has {len(self.tokens)} entries and seconds {len(self.seconds)}; make them equal")
        rising = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if not rising or self.tokens[0] < 1:
            raise ValueError(f"tokens must rise from at least 1, got {self.tokens}")
        if not all(map(math.isfinite, self.seconds)):
            raise ValueError(f"seconds must be finite, got {self.seconds}")
        if self.seconds[0] < 0 or any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ValueError(f"seconds must be at least 0 and never fall, got {self.seconds}")
        return self


class EnginePolicy(Settings):
    """What one engine does with its waiting queue and its KV blocks: vLLM's `additional_config["fairway"]`."""

    ordering: Literal[
        "fairway-carried",
        "fairway",
        "fcfs",
        "lpm",
        "k-lpm-4",
        "k-lpm-8",
        "ragcache",
        "preble",
        "peek",
        "absolute-wait",
        "relative-wait",
        "fairway-absolute-wait",
    ] = "fairway-carried"
    """Order of the waiting queue: ours, Fairway as published, first come first served, longest prefix match first, or a
    baseline to compare them with (`serve_app.policies.orderings`)."""
    eviction: Literal["adaptive", "rlt", "lru"] = "adaptive"
    """Which cached KV block goes first: a randomized leaf token, the least recently used, or a mixture of both that
    follows the one that would have hit more lately; "rlt" and "adaptive" need one KV cache group of full attention."""
    protect_waiting: bool | None = None
    """Whether cached KV blocks that a waiting request would hit are kept until it starts, as long as others can go;
    needs a model with one KV cache group of full attention. null: yes where the model is such a one and the ordering is
    fairway-carried."""
    fast_weight: float = Field(default=4.0, ge=1.0, le=64.0)
    """How firmly a request is kept from being overtaken: at most 1/fast_weight of the longest recent wait
    (fairway-carried), or of its own work in each step (fairway)."""
    patience_multiple: float | None = Field(default=None, gt=0.0, le=1_000.0)
    """A request's patience is this many times its expected prefill seconds on an idle engine, of what is left of it and
    by size class with fairway-carried. null: 2 with fairway-carried, 3 with the others, as published."""
    patience_floor_s: Seconds = 1.0
    """Least patience of any request, seconds; fairway-carried has none."""
    long_prefill_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Largest share of a step that running prefills may take while other requests wait; 1 lets them take all. null: a
    half with fairway-carried, 1 with the others, as published."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the randomized eviction."""
    prefill_profile: PrefillTable | None = None
    """Expected prefill seconds by length; without one they are estimated from the engine's own steps, beginning at
    10,000 tokens/s, and a warning is logged."""

    @property
    def is_carried(self) -> bool:
        """Whether the ordering keeps accounts across steps, which brings its other parts by default."""
        return self.ordering == "fairway-carried"

    def patience(self) -> float:
        """The patience multiple in force."""
        return self.patience_multiple or (2.0 if self.is_carried else 3.0)

    def prefill_share(self) -> float:
        """The long-prefill share in force."""
        return self.long_prefill_share or (0.5 if self.is_carried else 1.0)

    def changed(self, changes: Mapping[str, object]) -> "EnginePolicy":
        """This policy with some of `LIVE_FIELDS` set otherwise.

        Raises:
            ValueError: in one line, with each bad field's name, its value and its bound, and what can be changed.
        """
        fixed = sorted(set(changes) - set(LIVE_FIELDS))
        if fixed:
            raise ValueError(f"{', '.join(fixed)} can't be changed in a running engine; {', '.join(LIVE_FIELDS)} can")
        return EnginePolicy.from_section({"policy": {**self.model_dump(), **changes}}, "policy")


LIVE_FIELDS = (
    "ordering",
    "eviction",
    "protect_waiting",
    "fast_weight",
    "patience_multiple",
    "patience_floor_s",
    "long_prefill_share",
)
"""Fields of `EnginePolicy` that a running engine takes over at its next step."""


class RoutingWeights(Settings):
    """Weights of LBGR's predicted seconds; every term is in seconds, so a weight has no unit."""

    miss: Weight = 1.0
    """Prefill seconds of the tokens that the replica must compute."""
    hit: Weight = 1.0
    """Seconds that the replica's cached tokens still cost."""
    queue: float = Field(default=1.0, gt=0.0, le=1_000.0, allow_inf_nan=False)
    """Seconds of work already assigned to the replica; above 0, or load would be ignored and one replica flooded."""
    affinity: Weight = 0.5
    """Price of recomputing here what another replica has cached: how firmly a prefix stays at its home at rest."""
    affinity_load: Weight = 0.1
    """How much that price rises with load: multiple of the requests that a second of wasted work would delay
    (`serve_app.router.pressure`)."""
    residual: Weight = 1.0
    """The online regression's correction."""
    load_half_life_s: Seconds = 600.0
    """Half-life of assigned work that nobody has reported on; long means that only life-cycle events release it."""
    explore: float = Field(default=0.0, ge=0.0, le=0.5, allow_inf_nan=False)
    """Share of requests that go to a replica drawn at random, so that the regression sees them all."""


class RoutingDocument(Settings):
    """What the control deployment edits live and every ingress replica follows."""

    version: int = Field(default=1, ge=1)
    """Rises by one with every change."""
    router: Literal[
        "lbgr",
        "round-robin",
        "power-of-two",
        "least-work",
        "cache-aware-0.3",
        "cache-aware-0.4",
        "cache-aware-0.5",
        "prefix-affinity",
        "prefix-affinity-8",
        "lmetric",
        "lbgr-published",
    ] = "lbgr"
    """Which rule picks the replica."""
    weights: RoutingWeights = RoutingWeights()


class RouterSettings(Settings):
    """The router as it starts; its `routing` part can be changed live."""

    routing: RoutingDocument = RoutingDocument()
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of random tie-breaks and of power of two's draws."""
    residual_bound_s: Seconds = 1.0
    """The regression may move a choice by at most this much, either way."""
    residual_min_samples: int = Field(default=16, ge=1, le=100_000)
    """Completions before the regression is used at all; until then it adds 0."""
    decisions_kept: int = Field(default=512, ge=50, le=100_000)
    """Size of the ring of explained decisions."""
    orphan_grace_s: Seconds = 5.0
    """A reservation this old that its replica does not know of is released; replicas say every second what they know
    of, and one that opens later is reserved again."""
    max_index_blocks: int = Field(default=4_000_000, ge=1_000, le=100_000_000)
    """Cap on (replica, KV block) pairs in the prefix index; over it, that replica's oldest entries are forgotten."""


class ModelSettings(Settings):
    """The one model that is served."""

    id: str = Field(default="smollm2-135m-instruct", min_length=1, max_length=200)
    """Name in the OpenAI API."""
    source: str = Field(default="~/.cache/fairway-serve/smollm2-135m-instruct", min_length=1)
    """Hugging Face directory or repository; `~` is expanded."""


class ReplicaSettings(Settings):
    """How many engines there are and what each holds."""

    count: int | None = Field(default=2, ge=1, le=100)
    """Fixed number of replicas; null when autoscaling between `min` and `max`."""
    min: int = Field(default=1, ge=1, le=100)
    """Least replicas when autoscaling."""
    max: int = Field(default=10, ge=1, le=100)
    """Most replicas when autoscaling."""
    target_queued_s: Seconds = 2.0
    """Autoscaling aims at this many seconds of queued prefill work a replica."""
    num_cpus: float = Field(default=1.0, ge=0.0, le=256.0)
    """Logical CPUs of the replica's own process (the engine takes one more on CPU)."""
    num_gpus: float = Field(default=0.0, ge=0.0, le=16.0)
    """GPUs of the replica; 1 on real or logical GPUs with the CPU executor, 0 where Ray Serve LLM asks for them."""
    max_ongoing_requests: int = Field(default=1_000, ge=1, le=1_000_000)
    """Bound of requests in flight on one replica."""

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> "ReplicaSettings":
        if self.min > self.max:
            raise ValueError(f"replicas.min is {self.min} and replicas.max {self.max}; min must be at most max")
        return self


class EngineSettings(Settings):
    """vLLM itself; what is not named here is vLLM's default."""

    accelerator: Literal["cpu", "gpu"] = "cpu"
    """What the engine computes on; "cpu" needs the `cpu` extra, "gpu" the `gpu` extra and one GPU a replica."""
    accelerator_type: str | None = None
    """Ray accelerator type of a GPU replica, for example "L4"; null takes any."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """vLLM engine arguments by name, checked by vLLM at start."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the engine's processes, for example VLLM_CPU_KVCACHE_SPACE."""
    policy: EnginePolicy = EnginePolicy()
    emulation: EmulationSettings | None = None
    """Replaces the forward pass by its duration, without a model; null runs the real model."""
    prefill_profile: Path | None = None
    """JSON file with a `PrefillTable`, read once by the builder; relative to the working directory or the project."""


class IngressSettings(Settings):
    """The routing step in front of the engines."""

    max_tokenise_bytes: int = Field(default=2_000_000, ge=1_000, le=64_000_000)
    """A longer body is routed by load only."""
    long_body_bytes: int = Field(default=65_536, ge=1_000, le=64_000_000)
    """A longer body is tokenised by a thread of its own, so that it holds up no shorter one."""
    tokenise_timeout_s: float = Field(default=3.0, gt=0.0, le=4.0)
    """A body that is not tokenised by then is routed by load; HAProxy gives the routing step 5 s."""
    allow_wishes: bool = False
    """Whether a request may pin its replica and name its rule in the body's `fairway` object."""


class FairwayServeConfig(Settings):
    """Argument of `serve_app.app:build`."""

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    replicas: ReplicaSettings = ReplicaSettings()
    router: RouterSettings = RouterSettings()
    ingress: IngressSettings = IngressSettings()


class ControlConfig(Settings):
    """Argument of `serve_app.app:build_control`."""

    serving_app: str = Field(default="fairway", min_length=1)
    """Name of the Serve application that `serve_app.app:build` made."""
    token: str | None = Field(default=None, min_length=16, repr=False)
    """Bearer token for changes; null makes one at start and prints it once in the log of the control replica."""
    state_dir: Path = Path("~/.local/state/fairway-serve")
    """Where the weights' history is kept; `~` is expanded."""
