"""KV events leave the engine on the one address that it was given, not on all of the machine's."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from serve_app.policies.vllm_hooks import FairwayScheduler
from serve_app.router.ray_internals import _as_ipv6, free_ports
from tests.policies.scheduler_rig import make_scheduler


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[ZmqEventPublisher, int]]:
    """A publisher made after the scheduler, in the same process, as vLLM's scheduler makes its own."""
    make_scheduler(tmp_path, FairwayScheduler)
    port, replay_port = free_ports(2, "127.0.0.1")
    endpoint = f"tcp://{_as_ipv6('127.0.0.1')}:{port}"
    publisher = ZmqEventPublisher(0, endpoint, f"tcp://127.0.0.1:{replay_port}", topic="replica")
    yield publisher, port
    publisher.shutdown()
    zmq.Context.instance().setsockopt(zmq.IPV6, 0)


def test_publisher_binds_the_given_ipv4_address_and_is_heard_there(published: tuple[ZmqEventPublisher, int]) -> None:
    publisher, port = published
    with zmq.Context() as context, context.socket(zmq.SUB) as heard:
        heard.setsockopt(zmq.LINGER, 0)
        heard.setsockopt(zmq.SUBSCRIBE, b"replica")
        heard.connect(f"tcp://127.0.0.1:{port}")
        deadline_s = time.monotonic() + 10
        while not heard.poll(50) and time.monotonic() < deadline_s:
            publisher.publish(KVEventBatch(ts=1.0, events=[]))
        topic, _, payload = heard.recv_multipart(zmq.NOBLOCK)
        assert topic == b"replica"
        assert msgspec.msgpack.decode(payload, type=KVEventBatch).events == []
    assert publisher._pub.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0") == f"tcp://[::ffff:127.0.0.1]:{port}".encode()
