"""When the requests of a family come: in three phases, at one rate, or all at once.

A family says what is asked, this file when. Arrivals are Poisson within a phase: their number is Poisson(rate x
duration), their times are uniform. The phases are those of Fairway's dynamic trace: calm, burst, a spike over capacity,
then drain, in which nothing arrives. Cost: O(requests) beside the family's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serve_app.sim.arrivals import Arrival
from serve_app.sim.draws import FloatArray, TokenArray, check_above_zero, check_at_least, poisson_times

PHASES = ("calm", "burst", "spike")
"""The phases of a dynamic trace, in order; a request belongs to the phase in which it arrives."""


class Family(Protocol):
    """A mix of requests: the parameters of one kind of work."""

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """One prompt for each request; `phases` names the phase of each, in order of arrival."""


@dataclass(frozen=True, slots=True)
class DynamicParams:
    """A family at three rates, one after the other."""

    family: Family
    rates_per_s: tuple[float, float, float]
    """Requests a second in the calm, the burst and the spike, each above 0."""
    durations_s: tuple[float, float, float] = (300.0, 240.0, 60.0)
    """Lengths of the calm, the burst and the spike, each above 0."""
    output_tokens: int = 1
    """Tokens that each request generates, at least 1."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        for name, values in (("rates_per_s", self.rates_per_s), ("durations_s", self.durations_s)):
            if len(values) != len(PHASES) or not all(0.0 < value < float("inf") for value in values):
                raise ValueError(f"{name} is {values}; it must be {len(PHASES)} finite numbers above 0")
        check_at_least(1, self, "output_tokens")


def dynamic(params: DynamicParams, rng: np.random.Generator) -> list[Arrival]:
    """Phases "calm", "burst" and "spike"; nothing arrives after the spike."""
    starts_s = np.cumsum((0.0, *params.durations_s[:-1])).tolist()
    parts_s = [
        poisson_times(rate_per_s, start_s, duration_s, rng)
        for rate_per_s, start_s, duration_s in zip(params.rates_per_s, starts_s, params.durations_s, strict=True)
    ]
    phases = [phase for phase, part_s in zip(PHASES, parts_s, strict=True) for _ in part_s]
    prompts = params.family.prompts(phases, rng)
    return _arrivals("dynamic", np.concatenate(parts_s), prompts, params.output_tokens, phases)


@dataclass(frozen=True, slots=True)
class SteadyParams:
    """A family at one rate."""

    family: Family
    rate_per_s: float
    """Requests a second of the Poisson process, above 0."""
    duration_s: float = 300.0
    """How long requests arrive, above 0."""
    output_tokens: int = 1
    """Tokens that each request generates, at least 1."""
    mix: str = "calm"
    """Phase whose mix the requests have; it matters to a family that asks other things in the spike."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_above_zero(self, "rate_per_s", "duration_s")
        check_at_least(1, self, "output_tokens")
        _check_mix(self.mix)


def steady(params: SteadyParams, rng: np.random.Generator) -> list[Arrival]:
    """Poisson arrivals at one rate; one phase, "all"."""
    times_s = poisson_times(params.rate_per_s, 0.0, params.duration_s, rng)
    prompts = params.family.prompts([params.mix] * len(times_s), rng)
    return _arrivals("steady", times_s, prompts, params.output_tokens, ["all"] * len(times_s))


@dataclass(frozen=True, slots=True)
class SaturatedParams:
    """A family with all of its requests waiting from the start: what measures capacity."""

    family: Family
    num_requests: int
    """Requests, at least 1."""
    output_tokens: int = 1
    """Tokens that each request generates, at least 1."""
    mix: str = "calm"
    """Phase whose mix the requests have; it matters to a family that asks other things in the spike."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its value and its bound."""
        check_at_least(1, self, "num_requests", "output_tokens")
        _check_mix(self.mix)


def saturated(params: SaturatedParams, rng: np.random.Generator) -> list[Arrival]:
    """All requests at time 0; one phase, "all"."""
    times_s = np.zeros(params.num_requests)
    prompts = params.family.prompts([params.mix] * params.num_requests, rng)
    return _arrivals("saturated", times_s, prompts, params.output_tokens, ["all"] * params.num_requests)


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A family whose prompts are given: an agent workload or a recorded trace, at other times than its own.

    Prompts keep their order, so what is reused soon stays reused soon; gaps and output lengths are lost.
    """

    given: Sequence[TokenArray]
    """The prompts in order, each at least 1 token; the first ones are used."""

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """As many of the given prompts as there are phases. Raises ValueError when that is too many."""
        if len(phases) > len(self.given):
            raise ValueError(f"{len(phases)} requests are asked for; given has {len(self.given)} prompts")
        return list(self.given[: len(phases)])


def _arrivals(
    name: str, times_s: FloatArray, prompts: Sequence[TokenArray], output_tokens: int, phases: Sequence[str]
) -> list[Arrival]:
    return [
        Arrival(at_s, f"{name}-{number}", prompt, output_tokens, phase)
        for number, (at_s, prompt, phase) in enumerate(zip(times_s.tolist(), prompts, phases, strict=True))
    ]


def _check_mix(mix: str) -> None:
    if mix not in PHASES:
        raise ValueError(f"mix is {mix!r}; it must be one of {PHASES}")
