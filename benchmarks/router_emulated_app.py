"""Our whole app under load: HAProxy, two ingresses, four emulated engines and control, on a local cluster.

It is made fresh without a restart where that leaves nothing behind: every engine's prefix cache is emptied, and the
router is known to have heard of it when its index, which follows the engines' events, is empty in every ingress; its
history of routed prompts goes with a change of rule. LBGR's regression can't be emptied, so for that rule the cluster
is started anew. What remains inside the engines is the adaptive eviction's opinion of LRU.
"""

import re
import time
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from router_emulated_cells import ENGINE, Router, Scale
from router_emulated_load import MODEL, PATH
from router_emulated_systems import (
    ENGINE_ENV,
    RESET_TIMEOUT_S,
    START_TIMEOUT_S,
    FreshBy,
    Say,
    SystemFailed,
    empty_cache,
    engine_policy,
    poll,
)

from serve_app.config import RouterSettings, RoutingWeights
from serve_app.local_cluster import ClusterError, LocalCluster
from serve_app.local_ray import PROXY_DIR
from serve_app.router.baselines import PUBLISHED_WEIGHTS
from serve_app.weights_client import put_document, read_document

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "emulated.yaml"
SETTLE_S = 10.0
"""After a start: Serve tells every 2 s where replicas publish their events, and nothing shows when it has."""
WARM_UP_WORDS = 100
FORGETTING_RULE = "round-robin"
"""A rule without a history: changing to it and on to another leaves none."""


class App:
    """Our app on a local cluster; one for all rules, which are switched live."""

    def __init__(self, scale: Scale, model: Path, say: Say) -> None:
        self._scale, self._model, self._say = scale, model, say
        self._cluster: LocalCluster | None = None
        self._untouched = False
        self._heard: set[tuple[str, str]] = set()
        """Pairs of an ingress and a replica whose KV events it was seen to follow."""

    @property
    def url(self) -> str:
        assert self._cluster is not None
        return self._cluster.url

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def make_fresh(self, router: Router, *, restart: bool) -> FreshBy:
        if (restart or router.learns) and not self._untouched:
            self._stop()
            self._start()
        if self._untouched:
            self._untouched = False
            self._switch(router.rule)
            return "restart"
        self._switch(FORGETTING_RULE)
        self._hear_everybody()
        for engine_url in self._engine_urls():
            empty_cache(engine_url)
            take_a_step(engine_url)
        poll(self._nothing_is_held, RESET_TIMEOUT_S, "an ingress still counts KV blocks or open requests")
        self._switch(router.rule)
        return "reset"

    def _start(self) -> None:
        try:
            self._start_once()
        except ClusterError as error:  # a free port may be taken by somebody else before it is bound
            self._say(f"starting once more, for: {error}")
            self._start_once()
        self._untouched = True

    def _start_once(self) -> None:
        cluster = LocalCluster(4 * self._scale.engines, self._scale.engines, self._say)
        self._cluster = cluster.__enter__()
        try:
            config = app_config(self._scale, self._model, cluster.token, cluster.run_dir / "control")
            cluster.deploy(config, timeout_s=START_TIMEOUT_S)
            poll(self._all_are_known, RESET_TIMEOUT_S, "an ingress does not know all replicas")
            time.sleep(SETTLE_S)
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None

    def _switch(self, rule: str) -> None:
        assert self._cluster is not None
        document = read_document(self.url)
        weights = routing_weights(rule, self._scale.time_scale)
        changed = document.model_copy(update={"router": rule, "weights": weights})
        version = put_document(self.url, self._cluster.token, changed).version
        poll(lambda: all(one["version"] == version for one in self._ingresses()), RESET_TIMEOUT_S, "no new rule")

    def _ingresses(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/fairway/state", timeout=10.0)
        answer.raise_for_status()
        ingresses: list[dict[str, Any]] = answer.json()["ingresses"]
        return ingresses

    def _replicas(self) -> list[dict[str, Any]]:
        """Every replica as every ingress sees it."""
        return [replica for ingress in self._ingresses() for replica in ingress["replicas"]]

    def _all_are_known(self) -> bool:
        return all(len(ingress["replicas"]) == self._scale.engines for ingress in self._ingresses())

    def _hear_everybody(self) -> None:
        """Make sure that every ingress has followed every replica's KV events: else an empty index proves nothing."""
        if not self._all_are_heard():
            for number in range(4 * self._scale.engines):
                prompt = f"warm-up {number}: " + f"{number} and " * WARM_UP_WORDS
                fields = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
                httpx.post(f"{self.url}{PATH}", json=fields, timeout=60.0).raise_for_status()
        poll(self._all_are_heard, RESET_TIMEOUT_S, "an ingress follows no KV events of some replica")

    def _all_are_heard(self) -> bool:
        ingresses = self._ingresses()
        pairs = {(one["ingress"], replica["replica_id"]): replica for one in ingresses for replica in one["replicas"]}
        self._heard |= {pair for pair, replica in pairs.items() if replica["index_blocks"]}
        return len(pairs) == self._scale.engines * len(ingresses) and pairs.keys() <= self._heard

    def _nothing_is_held(self) -> bool:
        return not any(replica["index_blocks"] or replica["num_open"] for replica in self._replicas())

    def _engine_urls(self) -> list[str]:
        assert self._cluster is not None
        (path,) = (self._cluster.run_dir / PROXY_DIR).rglob("haproxy.cfg")
        urls = replica_urls(path.read_text(), "fairway")
        if len(urls) != self._scale.engines:
            raise SystemFailed(f"HAProxy knows the replicas {urls}; it must know {self._scale.engines}")
        return urls


def app_config(scale: Scale, model: Path, token: str, state_dir: Path) -> dict[str, Any]:
    """configs/emulated.yaml with this benchmark's engines; what is in seconds is on the scaled clock."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    serving, control = config["applications"]
    bound_s = RouterSettings().residual_bound_s * scale.time_scale
    serving["args"] = {
        "model": {"id": MODEL, "source": str(model)},
        "engine": {
            "accelerator": "cpu",
            "emulation": scale.emulation.model_dump(mode="json"),
            "vllm": dict(ENGINE),
            "env": ENGINE_ENV,
            "policy": engine_policy(scale).model_dump(mode="json"),
        },
        "replicas": {"count": scale.engines, "num_gpus": 1},
        "router": {"residual_bound_s": bound_s},
    }
    control["args"].update(token=token, state_dir=str(state_dir))
    return config


def routing_weights(rule: str, time_scale: float) -> RoutingWeights:
    """The rule's own weights, with the load's half-life on the scaled clock."""
    weights = PUBLISHED_WEIGHTS.get(rule, RoutingWeights())
    return weights.model_copy(update={"load_half_life_s": weights.load_half_life_s * time_scale})


def take_a_step(engine_url: str) -> None:
    """Let an idle engine publish its events, which it does with its next step; too few tokens to fill a KV block."""
    fields = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    httpx.post(f"{engine_url}{PATH}", json=fields, timeout=60.0).raise_for_status()


def replica_urls(haproxy_config: str, app: str) -> list[str]:
    """Where the application's replicas listen, from the text of Serve's HAProxy configuration."""
    backend = re.search(rf"^backend http-{re.escape(app)}\n(.*?)(?=^\S|\Z)", haproxy_config, re.MULTILINE | re.DOTALL)
    servers = re.findall(r"^\s+server SERVE_REPLICA\S+ (\S+:\d+)", backend.group(1) if backend else "", re.MULTILINE)
    return [f"http://{address}" for address in servers]
