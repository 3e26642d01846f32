"""Life-cycle events on their way to the ingress: ordered, batched, numbered, healed."""

import asyncio
from collections.abc import Callable

import pytest

from serve_app.deployments.event_forwarder import MAX_EVENTS_KEPT, EventForwarder
from serve_app.router.lifecycle import Closed, EngineReport, FirstToken, LifecycleBatch, Opened


def _close(request_id: str) -> Closed:
    return Closed(request_id, 200, "finished", 1.0, 0.5, 10, 0, 1)


class Ingress:
    """Takes batches; can be slow, away, or hung once it has one."""

    def __init__(self) -> None:
        self.batches: list[LifecycleBatch] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.away = False
        self.answering = asyncio.Event()
        self.answering.set()

    async def send(self, batch: LifecycleBatch) -> None:
        await self.gate.wait()
        if self.away:
            raise ConnectionError("no ingress")
        self.batches.append(batch)
        await self.answering.wait()


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


async def test_batches_go_on_while_an_ingress_keeps_one_waiting(ingress: Ingress) -> None:
    forwarder = EventForwarder("r", ingress.send, heal_every_s=60, patience_s=0.02)
    forwarder.start()
    await _until(lambda: len(ingress.batches) == 1)
    ingress.answering.clear()
    for number in range(3):
        forwarder.report(Opened(f"q{number}", 1.0))
        await _until(lambda number=number: len(ingress.batches) == number + 2)  # type: ignore[misc]  # a default binds the loop variable
    await forwarder.close()
    assert [batch.seq for batch in ingress.batches] == [0, 1, 2, 3]


async def test_every_batch_carries_the_engine_s_figures_as_of_its_sending(ingress: Ingress) -> None:
    told: list[bool] = []

    def report(is_idle: bool) -> EngineReport:
        told.append(is_idle)
        return EngineReport(100 * len(told), 1, 2, 0.25)

    forwarder = EventForwarder("r", ingress.send, heal_every_s=60, engine_report=report)
    forwarder.start()
    await _until(lambda: len(ingress.batches) == 1)
    forwarder.report(Opened("q", 1.0))
    await _until(lambda: len(ingress.batches) == 2)
    forwarder.report(_close("q"))
    await _until(lambda: len(ingress.batches) == 3)
    await forwarder.close()
    assert [batch.report for batch in ingress.batches] == [EngineReport(n, 1, 2, 0.25) for n in (100, 200, 300)]
    assert told == [True, False, True]


async def test_forwarder_is_drained_when_nothing_is_open_and_every_ingress_has_every_event(ingress: Ingress) -> None:
    forwarder = EventForwarder("r", ingress.send, heal_every_s=60)
    forwarder.start()
    forwarder.report(Opened("q", 1.0))
    ingress.answering.clear()
    drained = asyncio.create_task(forwarder.drained())
    forwarder.report(_close("q"))
    await _until(lambda: sum(len(batch.events) for batch in ingress.batches) == 2)
    assert not drained.done()
    ingress.answering.set()
    await asyncio.wait_for(drained, 5)
    await forwarder.close()


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
