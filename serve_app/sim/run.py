"""Many simulated replicas behind the real router, on one virtual clock.

What is real: vLLM's `Scheduler` and KV cache manager in each replica, our hooks in them, the prefix index fed by the
block pools' own KV events, the load ledger, the estimator and the choice. What is modelled: the forward pass (see
`step_time`), and the network (see `network`), which carries requests in no time. There is one ingress.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from serve_app.emulation.forward import ForwardModel
from serve_app.emulation.step_time import prefill_table
from serve_app.policies.prefill_profile import PrefillProfile
from serve_app.router.kv_event_batch import KvEvent, RemovedEvent, StoredEvent
from serve_app.router.lifecycle import LifecycleBatch, LifecycleEvent
from serve_app.router.routing_state import RouteRequest, RoutingState
from serve_app.sim.arrivals import Arrival
from serve_app.sim.chosen import Policies
from serve_app.sim.clock import VirtualClock, virtual_time
from serve_app.sim.columns import Served
from serve_app.sim.engine import EngineParams, KvEventTap, SimulatedScheduler, engine_config
from serve_app.sim.network import PERFECT_NETWORK, Fault, Network
from serve_app.sim.prompts import HashedPrompts
from serve_app.sim.replica import STEP_END_PRIORITY, Replica

FAULT_PRIORITY = 1
"""After a step that ends at the same time, before a request that arrives."""
ARRIVAL_PRIORITY = 2

Progress = Callable[[int, int], None]
"""Called with (requests finished, requests in all)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the requests meet, whatever the policies."""

    engine: EngineParams
    num_replicas: int = 1
    """At least 1."""
    kv_events: bool = True
    """Whether the router's prefix index hears of the replicas' KV blocks; with one replica it makes no difference."""
    network: Network = PERFECT_NETWORK
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas is {self.num_replicas}; it must be at least 1")
        for fault in self.faults:
            if fault.replica >= self.num_replicas:
                raise ValueError(f"a fault's replica is {fault.replica}; it must be below {self.num_replicas}")


@dataclass(slots=True)
class _Counts:
    events_lost: int = 0
    """Batches of KV events that never arrived."""
    sent_again: int = 0
    """Requests whose replica died under them."""
    incarnations: int = 0
    """Replicas started."""


class Simulation:
    """All state of one run."""

    def __init__(self, cluster: Cluster, policies: Policies, seed: int, prompts: HashedPrompts | None = None) -> None:
        """Args: prompts: hashes that other runs over the same arrivals have computed; this run adds to them.

        Raises:
            ValueError: an unknown policy, or a field of one out of its bounds.
        """
        params = cluster.engine
        longest_tokens = params.device.kv_blocks * params.block_size_tokens
        table = prefill_table(params.device, params.max_step_tokens, longest_tokens)
        self.clock = VirtualClock()
        self.served: list[Served] = []
        self.counts = _Counts()
        self.routing = RoutingState(policies.router_settings(seed), PrefillProfile(table), params.block_size_tokens)
        self._cluster = cluster
        self._config = engine_config(params, policies.engine_policy(seed, table), cluster.kv_events)
        self._prompts = prompts or HashedPrompts(params.block_size_tokens)
        self._loss = np.random.default_rng(seed)
        self._waiting_for_a_replica: list[Arrival] = []
        self._progress: Callable[[], None] = lambda: None
        self.replicas = {name: self._replica(name) for name in map(_replica_id, range(cluster.num_replicas))}
        self.routing.set_replicas(self.replicas)

    def run(self, arrivals: Sequence[Arrival], progress: Progress | None = None) -> list[Served]:
        """Serve all arrivals; returns them in the order in which they finished."""
        for arrival in arrivals:
            self.clock.at(arrival.at_s, partial(self._arrive, arrival), ARRIVAL_PRIORITY)
        for fault in self._cluster.faults:
            self.clock.at(fault.at_s, partial(self._strike, fault), FAULT_PRIORITY)
        if progress is not None:
            self._progress = lambda: progress(len(self.served), len(arrivals))
        with virtual_time(self.clock):
            self.clock.run()
        return self.served

    def _replica(self, replica_id: str) -> Replica:
        scheduler = SimulatedScheduler(self.clock, self._config)
        # Nobody reads the simulated text, so one digest stands for every prompt.
        forward_model = ForwardModel(self._cluster.engine.device, digest=lambda token_ids: b"")
        self.counts.incarnations += 1
        incarnation = f"{replica_id}/{self.counts.incarnations}"
        replica = Replica(
            replica_id, incarnation, self.clock, scheduler, forward_model, self._on_events, self._on_served
        )
        if self._cluster.kv_events:
            scheduler.kv_event_publisher = KvEventTap(partial(self._on_kv_events, replica))
        return replica

    def _arrive(self, arrival: Arrival) -> None:
        if not self.replicas:
            self._waiting_for_a_replica.append(arrival)
            return
        # Python integers: a NumPy integer hashes differently in a block's key.
        token_ids: list[int] = arrival.prompt.tolist()
        prompt = self._prompts.of(arrival, token_ids)
        request = RouteRequest(arrival.request_id, len(token_ids), prompt.keys)
        decision = self.routing.decide(request, list(self.replicas), self.clock.now_s)
        block_hasher = self._prompts.request_hasher(prompt)
        self.replicas[decision.replica_id].add(arrival, token_ids, block_hasher, decision.service_s)

    def _on_events(self, replica: Replica, events: tuple[LifecycleEvent, ...]) -> None:
        batch = LifecycleBatch(replica.replica_id, replica.incarnation, replica.next_seq, events)
        replica.next_seq += 1
        self._after(self._cluster.network.load_delay_s, replica, lambda: self.routing.on_batch(batch, self.clock.now_s))

    def _on_kv_events(self, replica: Replica, events: list[KvEvent]) -> None:
        network = self._cluster.network
        if network.kv_event_loss and self._loss.random() < network.kv_event_loss:
            self.counts.events_lost += 1
            return
        self._after(network.kv_event_delay_s, replica, lambda: self._apply_kv_events(replica.replica_id, events))

    def _after(self, delay_s: float, sender: Replica, event: Callable[[], None]) -> None:
        """Run what `sender` reports after its delay; what a dead replica still had on its way is dropped."""
        if not delay_s:
            event()
            return

        def arrives() -> None:
            if self.replicas.get(sender.replica_id) is sender:
                event()

        self.clock.at(self.clock.now_s + delay_s, arrives, STEP_END_PRIORITY)

    def _apply_kv_events(self, replica_id: str, events: list[KvEvent]) -> None:
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

    def _strike(self, fault: Fault) -> None:
        replica_id = _replica_id(fault.replica)
        if fault.kind == "slow":
            self._set_slowdown(replica_id, fault.factor)
            self._later(fault.for_s, lambda: self._set_slowdown(replica_id, 1.0))
        elif (replica := self.replicas.pop(replica_id, None)) is not None:
            self.routing.set_replicas(self.replicas)
            lost = replica.die()
            self.counts.sent_again += len(lost)
            self._later(fault.for_s, lambda: self._come_back(replica_id))
            for arrival in lost:
                self._arrive(arrival)

    def _later(self, delay_s: float, event: Callable[[], None]) -> None:
        if delay_s < float("inf"):
            self.clock.at(self.clock.now_s + delay_s, event, FAULT_PRIORITY)

    def _set_slowdown(self, replica_id: str, factor: float) -> None:
        if (replica := self.replicas.get(replica_id)) is not None:
            replica.slowdown = factor

    def _come_back(self, replica_id: str) -> None:
        self.replicas[replica_id] = self._replica(replica_id)
        self.routing.set_replicas(self.replicas)
        waiting, self._waiting_for_a_replica = self._waiting_for_a_replica, []
        for arrival in waiting:
            self._arrive(arrival)


def _replica_id(number: int) -> str:
    return f"replica-{number}"
