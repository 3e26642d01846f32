"""What lies between the simulated parts, and what goes wrong: delays, losses and faults as plain values."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Network:
    """How news travels from the replicas to the router. Requests and tokens themselves take no time."""

    kv_event_delay_s: float = 0.0
    """Seconds from a step's end to the router's prefix index, at least 0."""
    kv_event_loss: float = 0.0
    """Probability that a batch of KV events never arrives, 0 to 1; nothing is replayed, which is the worst case."""
    load_delay_s: float = 0.0
    """Seconds from a step's end to the router's ledger and estimator (life-cycle events), at least 0."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        for name in ("kv_event_delay_s", "load_delay_s"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be finite and at least 0")
        if not 0.0 <= self.kv_event_loss <= 1.0:
            raise ValueError(f"kv_event_loss is {self.kv_event_loss}; it must be from 0 to 1")


PERFECT_NETWORK = Network()
"""No delay and no loss."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One replica goes wrong for a while."""

    at_s: float
    """When, at least 0."""
    replica: int
    """Number of the replica, from 0."""
    kind: Literal["restart", "slow"]
    """`restart`: it dies with its cache and comes back empty; the clients send what was open on it again, at once.
    `slow`: its steps take `factor` times as long."""
    for_s: float = math.inf
    """Seconds until it is back, or as fast as before, above 0; infinite: for good."""
    factor: float = 2.0
    """Of a slow replica, at least 1."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        if not 0.0 <= self.at_s < math.inf:
            raise ValueError(f"at_s is {self.at_s}; it must be finite and at least 0")
        if self.replica < 0:
            raise ValueError(f"replica is {self.replica}; it must be at least 0")
        if not self.for_s > 0.0:
            raise ValueError(f"for_s is {self.for_s}; it must be above 0")
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"factor is {self.factor}; it must be finite and at least 1")
