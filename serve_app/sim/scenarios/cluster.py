"""Scenarios of several replicas behind the router: L40s with Llama-3.1-8B (derived) unless said."""

from pathlib import Path

import numpy as np

from serve_app.sim.arrivals import GspParams, gsp
from serve_app.sim.grid import Built
from serve_app.sim.network import PERFECT_NETWORK, Fault, Network
from serve_app.sim.run import Cluster
from serve_app.sim.scenarios.sizing import BLOCK_SIZE_TOKENS, engine
from serve_app.sim.traces import TraceParams, read_mooncake
from serve_app.sim.workloads import ChatParams, LongdocParams, chat, longdoc

DEVICE = "l40"
NUM_REPLICAS = 4


def build_gsp(params: GspParams, cluster: Cluster, seed: int) -> Built:
    return Built(gsp(params, np.random.default_rng(seed)), cluster)


def build_chat(params: ChatParams, cluster: Cluster, seed: int) -> Built:
    return Built(chat(params, np.random.default_rng(seed)), cluster)


def build_longdoc(params: LongdocParams, cluster: Cluster, seed: int) -> Built:
    return Built(longdoc(params, np.random.default_rng(seed)), cluster)


def build_mooncake(path: Path, params: TraceParams, cluster: Cluster, seed: int) -> Built:
    return Built(read_mooncake(path, params, np.random.default_rng(seed)).arrivals, cluster)


def cluster_of(
    num_replicas: int = NUM_REPLICAS,
    device: str = DEVICE,
    kv_tokens: int | None = None,
    block_size_tokens: int = BLOCK_SIZE_TOKENS,
    network: Network = PERFECT_NETWORK,
    faults: tuple[Fault, ...] = (),
) -> Cluster:
    """Equal replicas; kv_tokens: of each one's cache, None: what fits beside the weights."""
    params = engine(device, kv_tokens, block_size_tokens)
    return Cluster(params, num_replicas, network=network, faults=faults)
