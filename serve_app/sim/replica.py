"""One simulated replica: vLLM's real scheduler and KV cache manager with our hooks, and no model.

Approximations: a step is scheduled when the one before it has ended (as vLLM does without asynchronous scheduling), and
scheduling, sampling and the API server take no time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from serve_app.emulation.forward import Forward, ForwardModel
from serve_app.emulation.worker import runner_output
from serve_app.router.lifecycle import Closed, FirstToken, LifecycleEvent, Opened
from serve_app.sim.arrivals import Arrival
from serve_app.sim.clock import VirtualClock
from serve_app.sim.columns import Served
from serve_app.sim.engine import SimulatedScheduler

STEP_END_PRIORITY = 0
"""A step that ends when a request arrives ends first, so that the request finds the engine as it is after the step."""

BlockHasher = Callable[[Any], list[bytes]]


@dataclass(slots=True)
class _Open:
    arrival: Arrival
    ttft_s: float | None = None
    cached_tokens: int = 0


class Replica:
    """Runs steps back to back while there is work; reports as a real replica does."""

    def __init__(
        self,
        replica_id: str,
        incarnation: str,
        clock: VirtualClock,
        scheduler: SimulatedScheduler,
        forward_model: ForwardModel,
        on_events: Callable[["Replica", tuple[LifecycleEvent, ...]], None],
        on_served: Callable[[Served], None],
    ) -> None:
        self.replica_id = replica_id
        self.incarnation = incarnation
        self.scheduler = scheduler
        self.slowdown = 1.0
        """Factor of each step's duration, from the next step on."""
        self.next_seq = 0
        """Of its life-cycle batches."""
        self._clock = clock
        self._forward_model = forward_model
        self._on_events = on_events
        self._on_served = on_served
        self._open: dict[str, _Open] = {}
        self._busy = False
        self._is_dead = False

    def add(self, arrival: Arrival, token_ids: list[int], block_hasher: BlockHasher, service_s: float) -> None:
        """The request reaches the engine now.

        Raises:
            ValueError: it is longer than the model's length, which vLLM's API server would answer with 400.
        """
        needed, longest = len(token_ids) + arrival.output_tokens, self.scheduler.max_model_len
        if needed > longest:
            raise ValueError(f"{arrival.request_id} needs {needed} tokens and the engine takes at most {longest}")
        request = self._request(arrival, token_ids, block_hasher)
        self._open[arrival.request_id] = _Open(arrival)
        self._on_events(self, (Opened(arrival.request_id, service_s),))
        self.scheduler.add_request(request)
        if not self._busy:
            self._begin_step()

    def die(self) -> list[Arrival]:
        """End at once, in mid-step: nothing is reported any more. Returns: what was open, in order of arrival here."""
        self._is_dead = True
        lost = [one.arrival for one in self._open.values()]
        self._open.clear()
        return lost

    def _request(self, arrival: Arrival, token_ids: list[int], block_hasher: BlockHasher) -> Request:
        return Request(
            request_id=arrival.request_id,
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, detokenize=False),
            pooling_params=None,
            arrival_time=self._clock.now_s,
            block_hasher=block_hasher,
        )

    def _begin_step(self) -> None:
        output = self.scheduler.schedule()
        forward = self._forward_model.run(output)
        # Any one request fits; a step without tokens only tells the model runner what has finished.
        assert forward.req_ids or not self.scheduler.has_unfinished_requests(), f"{self.replica_id} is stuck"
        self._busy = True
        end_s = self._clock.now_s + self.slowdown * forward.duration_s
        self._clock.at(end_s, lambda: self._end_step(output, forward), STEP_END_PRIORITY)

    def _end_step(self, output: Any, forward: Forward) -> None:
        if self._is_dead:
            return
        self._busy = False
        by_client = self.scheduler.update_from_output(output, runner_output(forward))
        events = [
            event for client in by_client.values() for result in client.outputs for event in self._events_of(result)
        ]
        if events:
            self._on_events(self, tuple(events))
        if self.scheduler.has_requests():
            self._begin_step()

    def _events_of(self, result: Any) -> list[LifecycleEvent]:
        """What one of vLLM's `EngineCoreOutput`s means for its request."""
        one = self._open[result.request_id]
        events: list[LifecycleEvent] = []
        if one.ttft_s is None:
            one.ttft_s = self._clock.now_s - one.arrival.at_s
            one.cached_tokens = result.prefill_stats.num_cached_tokens
            events.append(FirstToken(result.request_id, one.ttft_s, one.cached_tokens, len(one.arrival.prompt)))
        if result.finish_reason is not None:
            events.append(self._close(result.request_id))
        return events

    def _close(self, request_id: str) -> Closed:
        one = self._open.pop(request_id)
        assert one.ttft_s is not None
        served = Served(
            request_id=request_id,
            replica_id=self.replica_id,
            phase=one.arrival.phase,
            arrival_s=one.arrival.at_s,
            ttft_s=one.ttft_s,
            latency_s=self._clock.now_s - one.arrival.at_s,
            prompt_tokens=len(one.arrival.prompt),
            cached_tokens=one.cached_tokens,
            output_tokens=one.arrival.output_tokens,
        )
        self._on_served(served)
        return Closed(
            request_id=request_id,
            status=200,
            outcome="finished",
            e2e_s=served.latency_s,
            ttft_s=served.ttft_s,
            prompt_tokens=served.prompt_tokens,
            cached_tokens=served.cached_tokens,
            output_tokens=one.arrival.output_tokens,
        )
