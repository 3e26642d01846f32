"""What one HTTP request did inside its engine, gathered by two hooks that never meet.

The middleware opens a `RequestTrace` and puts it into a context variable; the wrapper around the engine's `generate`
finds it there, whatever vLLM's server does in between, and adds what the engine says. A batch of prompts is one HTTP
request, hence one trace: its first token is the latest prompt's first, so that it stands for the whole prefill.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

CURRENT: ContextVar["RequestTrace | None"] = ContextVar("fairway_request_trace", default=None)


@dataclass(slots=True)
class RequestTrace:
    """Counts of one routed HTTP request, filled while it runs."""

    request_id: str
    """The ingress' own id, never the client's."""
    started_s: float
    """Monotonic time of arrival in the middleware."""
    on_first_token: Callable[["RequestTrace"], None]
    """Called once, when every prompt of the request has produced a token."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    prompts_open: int = 0
    _first_seen: set[int] = field(default_factory=set)

    def started(self) -> int:
        """A prompt was handed to the engine; returns its number within the request."""
        self.prompts_open += 1
        return self.prompts_open

    def output(self, prompt: int, output: Any) -> None:
        """One `RequestOutput` of vLLM, carrying only tokens that are new (DELTA or FINAL_ONLY)."""
        new_tokens = sum(len(one.token_ids) for one in output.outputs)
        self.output_tokens += new_tokens
        if new_tokens == 0 or prompt in self._first_seen:
            return
        self._first_seen.add(prompt)
        self.prompt_tokens += len(output.prompt_token_ids or ())
        self.cached_tokens += output.num_cached_tokens or 0
        if len(self._first_seen) == self.prompts_open:
            self.ttft_s = time.monotonic() - self.started_s
            self.on_first_token(self)


def traced_generate(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """`generate` that also tells the trace of the HTTP request it serves; untraced calls pass through."""

    def generate_traced(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        # The context is read here, when vLLM's handler calls, not in the generator's first step: the generator may be
        # driven by another task.
        trace = CURRENT.get()
        stream = generate(*args, **kwargs)
        return stream if trace is None else _follow(stream, trace, trace.started())

    return generate_traced


async def _follow(stream: AsyncIterator[Any], trace: RequestTrace, prompt: int) -> AsyncIterator[Any]:
    async for output in stream:
        trace.output(prompt, output)
        yield output
