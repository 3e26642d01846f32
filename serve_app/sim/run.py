"""Many simulated replicas behind the real router, on one virtual clock; and the experiments that run on it.

What is real: vLLM's `Scheduler` and KV cache manager in each replica, our hooks in them, the prefix index fed by the
block pools' own KV events, the load ledger, the estimator and the choice. What is modelled: the forward pass (see
`step_time`), and the network, which takes no time and loses nothing. There is one ingress.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from vllm.config import VllmConfig

from serve_app.config import EnginePolicy, RouterSettings, RoutingDocument
from serve_app.emulation.forward import ForwardModel
from serve_app.emulation.step_time import prefill_table
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.block_hashes import BlockHasher
from serve_app.router.kv_event_batch import KvEvent, RemovedEvent, StoredEvent
from serve_app.router.lifecycle import LifecycleBatch, LifecycleEvent
from serve_app.router.routing_state import RouteRequest, RoutingState
from serve_app.sim.arrivals import Arrival, GspParams, gsp
from serve_app.sim.clock import VirtualClock, virtual_time
from serve_app.sim.engine import EngineParams, KvEventTap, SimulatedScheduler, engine_config
from serve_app.sim.metrics import Row, Served, phase_rows
from serve_app.sim.replica import Replica
from serve_app.sim.step_time import DEVICES

ARRIVAL_PRIORITY = 1

Progress = Callable[[int, int], None]
"""Called with (requests finished, requests in all)."""


@dataclass(frozen=True, slots=True)
class Policies:
    """The three decisions by name, as the settings spell them; the defaults are the product's."""

    router: str = "lbgr"
    ordering: str = "fairway"
    eviction: str = "rlt"


BASELINE = Policies(router="round-robin", ordering="fcfs", eviction="lru")
"""What a cluster does without us."""


class Simulation:
    """All state of one run."""

    def __init__(self, params: EngineParams, num_replicas: int, policies: Policies, seed: int) -> None:
        """Raises ValueError on an unknown policy and on less than one replica."""
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}; it must be at least 1")
        longest_tokens = params.device.kv_blocks * params.block_size_tokens
        table = prefill_table(params.device, params.max_step_tokens, longest_tokens)
        routing = RoutingDocument.model_validate({"router": policies.router})
        chosen = {"ordering": policies.ordering, "eviction": policies.eviction}
        engine_policy = EnginePolicy.model_validate({**chosen, "seed": seed, "prefill_profile": table})
        self.clock = VirtualClock()
        self.served: list[Served] = []
        self.routing = RoutingState(
            RouterSettings(routing=routing, seed=seed), PrefillProfile(table), params.block_size_tokens
        )
        self._hasher = BlockHasher(params.block_size_tokens)
        self._next_seq: dict[str, int] = {}
        self._progress: Callable[[], None] = lambda: None
        config = engine_config(params, engine_policy)
        ids = [f"replica-{number}" for number in range(num_replicas)]
        self.replicas = {replica_id: self._replica(replica_id, params, config) for replica_id in ids}
        self.routing.set_replicas(ids)

    def run(self, arrivals: Sequence[Arrival], progress: Progress | None = None) -> list[Served]:
        """Serve all arrivals; returns them in the order in which they finished."""
        for arrival in arrivals:
            self.clock.at(arrival.at_s, partial(self._arrive, arrival), ARRIVAL_PRIORITY)
        if progress is not None:
            self._progress = lambda: progress(len(self.served), len(arrivals))
        with virtual_time(self.clock):
            self.clock.run()
        return self.served

    def _replica(self, replica_id: str, params: EngineParams, config: VllmConfig) -> Replica:
        scheduler = SimulatedScheduler(self.clock, config)
        scheduler.kv_event_publisher = KvEventTap(partial(self._on_kv_events, replica_id))
        forward_model = ForwardModel(params.device)
        return Replica(replica_id, self.clock, scheduler, forward_model, self._on_events, self._on_served)

    def _arrive(self, arrival: Arrival) -> None:
        # Python integers: a NumPy integer hashes differently in a block's key.
        token_ids: list[int] = arrival.prompt.tolist()
        request = RouteRequest(arrival.request_id, len(token_ids), self._hasher.hashes(token_ids))
        decision = self.routing.decide(request, list(self.replicas), self.clock.now_s)
        self.replicas[decision.replica_id].add(arrival, token_ids, decision.service_s)

    def _on_events(self, replica_id: str, events: tuple[LifecycleEvent, ...]) -> None:
        seq = self._next_seq.get(replica_id, 0)
        self._next_seq[replica_id] = seq + 1
        self.routing.on_batch(LifecycleBatch(replica_id, replica_id, seq, events), self.clock.now_s)

    def _on_kv_events(self, replica_id: str, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, StoredEvent):
                self.routing.index.stored(replica_id, event.hashes)
            elif isinstance(event, RemovedEvent):
                self.routing.index.removed(replica_id, event.hashes)
            else:
                self.routing.index.clear(replica_id)

    def _on_served(self, served: Served) -> None:
        self.served.append(served)
        self._progress()


def simulate(
    arrivals: Sequence[Arrival],
    policies: Policies,
    replicas: int,
    seed: int,
    params: EngineParams,
    progress: Progress | None = None,
) -> list[Row]:
    """Run one set of policies; one row a phase, the policies' names first."""
    served = Simulation(params, replicas, policies, seed).run(arrivals, progress)
    default = {"default": True} if policies == Policies() else {}
    return [{**asdict(policies), **default, **row} for row in phase_rows(served, replicas)]


def simulate_gsp(
    replicas: int = 4,
    rate_per_s: float = 24.0,
    seed: int = 0,
    router: str = "lbgr",
    ordering: str = "fairway",
    eviction: str = "rlt",
    baseline: bool = True,
    groups: int = 32,
    prompts_per_group: int = 16,
    device: str = "emulated",
    progress: Progress | None = None,
) -> list[Row]:
    """Generated shared prefixes, half of each prompt shared by its group, in random order at Poisson times.

    Args:
        rate_per_s: arrivals a second over all replicas; 24 is about what four `emulated` replicas sustain under round
            robin.
        baseline: also run round robin, first come first served and LRU on the same arrivals, as the first row.
        device: a name in `step_time.DEVICES`.

    Returns: one row for each set of policies.

    Raises:
        ValueError: an unknown name, or a number out of its range.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; it must be one of {sorted(DEVICES)}")
    workload = GspParams(num_groups=groups, prompts_per_group=prompts_per_group, rate_per_s=rate_per_s)
    arrivals = gsp(workload, np.random.default_rng(seed))
    chosen = Policies(router, ordering, eviction)
    compared = [BASELINE, chosen] if baseline and chosen != BASELINE else [chosen]
    params = EngineParams(DEVICES[device])
    rows = [row for one in compared for row in simulate(arrivals, one, replicas, seed, params, progress)]
    return [{"scenario": f"gsp-{rate_per_s:g}", **row} for row in rows]
