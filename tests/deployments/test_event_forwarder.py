"""Life-cycle events on their way to the ingress: ordered, batched, numbered, healed."""

import asyncio
from collections.abc import Callable

import pytest

from serve_app.deployments.event_forwarder import MAX_EVENTS_KEPT, EventForwarder
from serve_app.router.lifecycle import Closed, FirstToken, LifecycleBatch, Opened


def _close(request_id: str) -> Closed:
    return Closed(request_id, 200, "finished", 1.0, 0.5, 10, 0, 1)


class Ingress:
    """Takes batches; can be slow or away."""

    def __init__(self) -> None:
        self.batches: list[LifecycleBatch] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.away = False

    async def send(self, batch: LifecycleBatch) -> None:
        await self.gate.wait()
        if self.away:
            raise ConnectionError("no ingress")
        self.batches.append(batch)


@pytest.fixture
def ingress() -> Ingress:
    return Ingress()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # the condition is over what the forwarder already sent
            await asyncio.sleep(0.005)


async def test_events_arrive_in_order_with_rising_sequence(ingress: Ingress) -> None:
    forwarder = EventForwarder("r", ingress.send, heal_every_s=60)
    forwarder.start()
    for number in range(50):
        forwarder.report(Opened(f"q{number}", 1.0))
        await asyncio.sleep(0)
    await _until(lambda: sum(len(batch.events) for batch in ingress.batches) == 50)
    await forwarder.close()
    events = [event for batch in ingress.batches for event in batch.events]
    assert [event.request_id for event in events] == [f"q{number}" for number in range(50)]
    assert [batch.seq for batch in ingress.batches] == list(range(len(ingress.batches)))


async def test_slow_ingress_gets_one_large_batch_not_many(ingress: Ingress) -> None:
    forwarder = EventForwarder("r", ingress.send, heal_every_s=60)
    forwarder.start()
    ingress.gate.clear()
    for number in range(100):
        forwarder.report(Opened(f"q{number}", 1.0))
        await asyncio.sleep(0)
    ingress.gate.set()
    await _until(lambda: sum(len(batch.events) for batch in ingress.batches) == 100)
    await forwarder.close()
    assert len(ingress.batches) <= 3


async def test_open_list_heals_what_was_lost_while_no_ingress_answered(ingress: Ingress) -> None:
    forwarder = EventForwarder("r", ingress.send, heal_every_s=0.05)
    forwarder.start()
    ingress.away = True
    forwarder.report(Opened("kept", 1.0))
    forwarder.report(Opened("gone", 1.0))
    forwarder.report(_close("gone"))
    await asyncio.sleep(0.1)
    ingress.away = False
    await _until(lambda: any(batch.open_ids == frozenset({"kept"}) for batch in ingress.batches))
    await forwarder.close()
    assert forwarder.open_ids == frozenset({"kept"})


async def test_events_that_nobody_takes_are_bounded(ingress: Ingress) -> None:
    forwarder = EventForwarder("r", ingress.send)
    for number in range(MAX_EVENTS_KEPT + 10):
        forwarder.report(Opened(f"q{number}", 1.0))
    assert len(forwarder._waiting) == MAX_EVENTS_KEPT


async def test_queued_work_is_what_waits_for_its_first_token(ingress: Ingress) -> None:
    forwarder = EventForwarder("r", ingress.send)
    forwarder.report(Opened("prefilled", 2.0))
    forwarder.report(Opened("refused", 3.0))
    forwarder.report(Opened("waiting", 0.5))
    assert forwarder.queued_prefill_s == 5.5
    forwarder.report(FirstToken("prefilled", 1.0, 0, 10))
    forwarder.report(_close("refused"))
    assert forwarder.queued_prefill_s == 0.5
    forwarder.report(_close("prefilled"))
    forwarder.report(_close("waiting"))
    assert forwarder.queued_prefill_s == 0.0
