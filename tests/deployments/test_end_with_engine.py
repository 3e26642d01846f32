"""A replica whose engine died tells its clients and the ingresses, and ends."""

import asyncio
import multiprocessing
from multiprocessing.connection import Connection

import pytest

from serve_app.deployments import worker
from serve_app.deployments.event_forwarder import EventForwarder
from serve_app.router.lifecycle import Closed, LifecycleBatch, Opened

FAILED = Closed("open", 500, "failed", 1.0, None, 0, 0, 0)


class Client:
    """An engine client; its engine dies."""

    errored = False


def _replica(told: Connection, is_answered: bool) -> None:
    """A process with one open request whose engine dies; it is answered, or its client never reads."""

    async def send(batch: LifecycleBatch) -> None:
        told.send(batch)

    async def serve() -> None:
        client, forwarder = Client(), EventForwarder("r", send, heal_every_s=60)
        forwarder.start()
        forwarder.report(Opened("open", 1.0))
        ending = asyncio.create_task(worker._end_with_engine(client, forwarder))
        await asyncio.sleep(0)
        client.errored = True
        if is_answered:
            forwarder.report(FAILED)
        await ending

    asyncio.run(serve())


@pytest.mark.parametrize("is_answered", [True, False])
def test_replica_ends_after_its_engine_and_passes_on_the_last_events(
    monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    monkeypatch.setattr(worker, "ENGINE_DEATH_SEEN_WITHIN_S", 0.01)
    monkeypatch.setattr(worker, "LAST_ANSWERS_WITHIN_S", 0.5)
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    replica = processes.Process(target=_replica, args=(sender, is_answered))
    replica.start()
    sender.close()
    replica.join(60)
    assert replica.exitcode == 1
    events = []
    while receiver.poll():
        try:
            events += receiver.recv().events
        except EOFError:
            break
    assert events == [Opened("open", 1.0), *([FAILED] if is_answered else [])]
