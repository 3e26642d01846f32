"""An engine computes before it serves: what its first step compiles would cost the first user seconds."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.deployments.worker import WARM_UP_PROMPT, FairwayEngine
from serve_app.router import ray_internals


class Client:
    """An engine client that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any, str]] = []

    async def generate(self, prompt: Any, sampling: Any, request_id: str) -> AsyncIterator[str]:
        self.asked.append((prompt, sampling, request_id))
        yield "output"


async def test_start_runs_a_greedy_and_a_sampled_request_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, client = FairwayEngine.__new__(FairwayEngine), Client()

    async def start(self: Any) -> None:
        self._engine_client = client

    monkeypatch.setattr(ray_internals.VLLMEngine, "start", start)
    await engine.start()
    assert [prompt["prompt_token_ids"] for prompt, _, _ in client.asked] == [WARM_UP_PROMPT] * 2
    assert [sampling.temperature for _, sampling, _ in client.asked] == [0.0, 1.0]
    assert len({request_id for _, _, request_id in client.asked}) == 2


def test_warm_up_prompt_fills_no_kv_block() -> None:
    assert len(WARM_UP_PROMPT) + 2 < 16
