"""Run as a module by test_metrics_export.py: a Ray of its own on loopback, two publications, one scrape on stdout."""

import os
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import fields

from serve_app.router.routing_state import RoutingState
from tests.observability.routed import ingress_snapshot, routed_state

DEADLINE_S = 60.0


def scrape(port: int) -> str:
    """What Ray's exporter shows once our metrics are there; it exports them some seconds after they are set."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as response:
                text: str = response.read().decode()
        except (urllib.error.URLError, ConnectionError):
            text = ""
        if "ray_fairway_decisions_total{" in text and 'router="round-robin"' in text:
            return text
        time.sleep(0.5)
    raise SystemExit(f"no fairway metrics within {DEADLINE_S} s")


def with_everything_counted(state: RoutingState) -> RoutingState:
    """No total at 0: Ray shows a counter only after its first increase."""
    for field in fields(state.totals):
        setattr(state.totals, field.name, max(1, getattr(state.totals, field.name)))
    state.index.num_forgotten = 1
    state.estimator._drifts = 1
    return state


def main() -> None:
    """Start, publish, scrape, print, stop."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_metrics_report_interval_ms="500")
    import ray

    from serve_app.observability.metrics import EngineMetrics, RoutingMetrics, publish_emulated

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    temp_dir = tempfile.mkdtemp(prefix="fairway-metrics-")
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        _temp_dir=temp_dir,
        _metrics_export_port=port,
    )
    try:
        publish_emulated("a", emulated=True)
        engine = EngineMetrics("a")
        for num_left in (2, 5, 1):  # the last is of an engine that started anew
            engine.publish({"num_due": 1, "waiting_todo_tokens": 700, "num_left_to_vllm": num_left})
        metrics = RoutingMetrics()
        metrics.publish(ingress_snapshot(with_everything_counted(routed_state(6))))
        metrics.publish(ingress_snapshot(with_everything_counted(routed_state(8)), router="round-robin"))
        print(scrape(port))
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
