"""A scenario that takes a fraction of a second, for tests of what is done with runs."""

from functools import partial

import numpy as np

from serve_app.emulation.settings import EmulationSettings
from serve_app.sim.arrivals import GspParams, gsp
from serve_app.sim.engine import EngineParams
from serve_app.sim.grid import Built, Scenario
from serve_app.sim.run import Cluster

ENGINE = EngineParams(
    EmulationSettings(step_base_s=0.01, s_per_token=1e-3, kv_blocks=200), max_step_tokens=100, max_running=64
)
GSP = GspParams(num_groups=6, prompts_per_group=4, prompt_tokens=(128, 256), rate_per_s=6.0)


def build_small(params: GspParams, num_replicas: int, seed: int) -> Built:
    return Built(gsp(params, np.random.default_rng(seed)), Cluster(ENGINE, num_replicas))


def small_scenario(name: str, seed: int, num_replicas: int = 1, params: GspParams = GSP) -> Scenario:
    return Scenario(name, partial(build_small, params, num_replicas, seed), seed)
