"""Publishers and a subscriber of KV events, shut down after the test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest

from serve_app.router.kv_events import KvEventSubscriber
from serve_app.router.prefix_index import PrefixIndex
from tests.router.kv_engine import LOOPBACK, Engine


@pytest.fixture
def start_engine() -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def start(topic: str, endpoint: str = LOOPBACK, buffer_steps: int = 100, replay: str = LOOPBACK) -> Engine:
            engine = Engine(topic, endpoint, buffer_steps, replay)
            stack.callback(engine.publisher.shutdown)
            return engine

        yield start


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(1_000_000)


@pytest.fixture
async def subscriber(index: PrefixIndex) -> AsyncIterator[KvEventSubscriber]:
    subscriber = KvEventSubscriber(index, replay_timeout_s=0.5)
    yield subscriber
    await subscriber.close()
    index.check_integrity()
    assert index.num_entries == 0
    assert all(task.get_name() == asyncio.current_task().get_name() for task in asyncio.all_tasks())  # type: ignore[union-attr]  # a test is a task
