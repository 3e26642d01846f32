"""The forward pass without a model: what each engine step computes and samples, read off vLLM's `SchedulerOutput`.

Shared by the emulated worker (wall clock) and the simulator (virtual time), so that the two cannot drift apart. The
rule that matters: a request samples one token exactly when the step reaches the end of the tokens known of it; an
unfinished prefill chunk, of a new prompt or of a preempted request that is computed again, samples nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.emulation.pseudo_text import prompt_digest, token_at
from serve_app.emulation.settings import EmulationSettings
from serve_app.emulation.step_time import Chunk, step_time_s


@dataclass(frozen=True, slots=True)
class _Prompt:
    digest: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Forward:
    """One step's result; the lists are parallel, one entry a request."""

    duration_s: float
    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    """One token id, or none while the request's prefill is unfinished."""


class ForwardModel:
    """Remembers each request's prompt from its first step to its end, as a real model runner does."""

    def __init__(self, settings: EmulationSettings, digest: Callable[[Sequence[int]], bytes] = prompt_digest) -> None:
        """Args: digest: what stands for a prompt in its pseudo-text; a constant one where nobody reads the text."""
        self._settings = settings
        self._digest = digest
        self._prompts: dict[str, _Prompt] = {}

    @property
    def num_requests(self) -> int:
        """Requests remembered; 0 once the scheduler has reported all of them finished."""
        return len(self._prompts)

    def run(self, scheduler_output: Any) -> Forward:
        """Compute one step; takes vLLM's `SchedulerOutput` and no time."""
        self._update_prompts(scheduler_output)
        scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        chunks: list[Chunk] = []
        req_ids: list[str] = []
        sampled: list[list[int]] = []
        for req_id, num_computed, num_output in _states(scheduler_output):
            num_tokens = scheduled[req_id]
            chunks.append((num_tokens, num_computed))
            req_ids.append(req_id)
            sampled.append(self._sample(self._prompts[req_id], num_computed + num_tokens, num_output))
        return Forward(step_time_s(self._settings, chunks), req_ids, sampled)

    def _sample(self, prompt: _Prompt, end: int, num_output: int) -> list[int]:
        if end < prompt.num_tokens + num_output:
            return []
        return [token_at(self._settings, prompt.digest, end - prompt.num_tokens)]

    def _update_prompts(self, scheduler_output: Any) -> None:
        for req_id in scheduler_output.finished_req_ids:
            self._prompts.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._prompts[new.req_id] = _Prompt(self._digest(new.prompt_token_ids or ()), new.prompt_len)


def _states(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """Each scheduled request: its id, tokens computed before this step, output tokens known before this step.

    Under asynchronous scheduling the two counts include tokens that are still being computed. A resumed request comes
    among the cached ones (model runner V1) or as new, with its outputs in `prefill_token_ids` (V2).
    """
    for new in scheduler_output.scheduled_new_reqs:
        num_known = len(new.prefill_token_ids) if new.prefill_token_ids else new.prompt_len
        yield new.req_id, new.num_computed_tokens, num_known - new.prompt_len
    cached = scheduler_output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
