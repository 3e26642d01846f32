"""How a scenario is sized: caches relative to what is reused, rates relative to what is completed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from serve_app.emulation.settings import EmulationSettings
from serve_app.emulation.step_time import prefill_time_s, step_time_s
from serve_app.sim.arrivals import Arrival
from serve_app.sim.draws import TokenArray
from serve_app.sim.engine import EngineParams
from serve_app.sim.run import Cluster
from serve_app.sim.scenarios import sizing
from serve_app.sim.scenarios.sizing import Repeatable, cache_tokens, completed_per_s, engine, one_engine, sizes
from serve_app.sim.step_time import DEVICES
from serve_app.sim.workloads import FAMILIES, SaturatedParams, reusable_tokens, saturated

BUDGET = 500
SETTINGS = EmulationSettings(step_base_s=0.01, s_per_token=1e-3, s_per_token_context=1e-6, kv_blocks=400)
SMALL = Cluster(EngineParams(SETTINGS, max_step_tokens=BUDGET), kv_events=False)
A6000 = DEVICES["a6000"]


def prompt(first: int, count: int) -> TokenArray:
    return np.arange(first, first + count, dtype=np.int32)


def arrivals_of(prompts: Sequence[TokenArray], output_tokens: int = 1) -> list[Arrival]:
    return [Arrival(float(number), str(number), one, output_tokens, "all") for number, one in enumerate(prompts)]


@dataclass(frozen=True, slots=True)
class Same:
    """Prompts of one length that share their beginning; in the spike all but the last 1,024 tokens."""

    tokens: int
    shared: int

    def prompts(self, phases: Sequence[str], rng: np.random.Generator) -> list[TokenArray]:
        """One prompt for each request."""
        shared = [self.tokens - 1_024 if phase == "spike" else self.shared for phase in phases]
        return [
            np.concatenate([prompt(0, same), prompt(10_000 * (number + 1), self.tokens - same)])
            for number, same in enumerate(shared)
        ]


@pytest.fixture
def few_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Capacity is measured on 60 requests, and nothing that was measured on them is remembered."""
    monkeypatch.setattr(sizing, "SIZING_REQUESTS", 60)
    sizes.cache_clear()
    yield
    sizes.cache_clear()


def test_cold_prompts_of_a_step_each_complete_at_one_over_the_steps_time() -> None:
    sample = arrivals_of([prompt(1_000 * number, BUDGET) for number in range(9)])
    assert completed_per_s(sample, SMALL) == pytest.approx(1 / step_time_s(SETTINGS, [(BUDGET, 0)]))


def test_cold_prompts_that_share_steps_complete_as_fast_as_their_steps_take() -> None:
    # 250 tokens each, two in a step, but the first and the last alone. Of 300, the 100th ends with the first of a step:
    # from there on 200 complete in 99 full steps and the last one.
    sample = arrivals_of([prompt(1_000 * number, BUDGET // 2) for number in range(300)])
    full_s, half_s = step_time_s(SETTINGS, [(250, 0)] * 2), step_time_s(SETTINGS, [(250, 0)])
    assert completed_per_s(sample, SMALL) == pytest.approx(200 / (99 * full_s + half_s))
    assert completed_per_s(sample, SMALL) == pytest.approx(2 / full_s, rel=0.01)


def test_warm_prompts_complete_at_the_rate_of_what_the_cache_leaves_to_compute() -> None:
    # 480 shared tokens are 30 blocks of 16, which the first computes; the other 500 take a step of their own.
    warm = [np.concatenate([prompt(0, 480), prompt(1_000 * number, BUDGET)]) for number in range(1, 10)]
    sample = arrivals_of([prompt(0, BUDGET), *warm])
    assert completed_per_s(sample, SMALL) == pytest.approx(1 / step_time_s(SETTINGS, [(BUDGET, 480)]))


@pytest.mark.parametrize("block_size_tokens", [16, 32, 64])
def test_engine_has_the_cache_that_was_asked_for_and_one_block_for_vllm(block_size_tokens: int) -> None:
    params = engine("l40", 6_400, block_size_tokens)
    assert (params.device.kv_blocks - 1) * params.block_size_tokens == 6_400
    assert params.device == DEVICES["l40"].model_copy(update={"kv_blocks": params.device.kv_blocks})


def test_engine_without_a_size_has_the_tokens_that_fit_beside_the_weights() -> None:
    params = engine("h200")
    assert (params.device.kv_blocks - 1) * params.block_size_tokens == DEVICES["h200"].kv_blocks * 16


def test_one_engine_is_one_replica_without_news_to_a_router() -> None:
    cluster = one_engine("a6000", 3_200)
    assert (cluster.num_replicas, cluster.kv_events, cluster.faults) == (1, False, ())
    assert cluster.engine == engine("a6000", 3_200)


def test_unknown_device_is_an_error() -> None:
    with pytest.raises(KeyError, match="b200"):
        engine("b200")


def test_cache_is_the_share_of_what_is_reused() -> None:
    # Ten prefixes of 3,200 tokens, each asked twice.
    sample = arrivals_of([np.concatenate([prompt(10_000 * n, 3_200), prompt(n, 40)]) for n in range(10)] * 2)
    assert reusable_tokens(sample, 32) == 32_320
    assert cache_tokens(sample, 0.5) == 16_160


def test_cache_never_falls_below_the_longest_request_and_a_step() -> None:
    sample = arrivals_of([prompt(0, 3_000), prompt(5_000, 500)], output_tokens=7)
    assert cache_tokens(sample, 0.3) == 3_007 + 2_048


# A sliding working set has no documents to repeat, and is sized by its own arrivals instead.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "recency"])
def test_repeatable_family_asks_from_the_same_documents_however_many_requests_there_are(name: str) -> None:
    family = Repeatable(FAMILIES[name], 7)
    few = family.prompts(["calm"] * 40, np.random.default_rng(1))
    many = family.prompts(["burst"] * 90, np.random.default_rng(2))
    # What the few would hit after the many is at least what they would hit after each other.
    assert shared_tokens(few, many) >= shared_tokens(few, few) > 0
    other = Repeatable(FAMILIES[name], 8).prompts(["calm"] * 90, np.random.default_rng(1))
    assert shared_tokens(few, other) == 0


def shared_tokens(prompts: list[TokenArray], others: list[TokenArray]) -> int:
    """Tokens of the longest prefix that each prompt shares with another object among `others`, in all."""
    return sum(max(common_tokens(one, other) for other in others if other is not one) for one in prompts)


def common_tokens(one: TokenArray, other: TokenArray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def test_repeatable_family_draws_nothing_from_the_generator_that_it_is_given() -> None:
    rng = np.random.default_rng(3)
    first = Repeatable(FAMILIES["filing"], 0).prompts(["calm"] * 5, rng)
    again = Repeatable(FAMILIES["filing"], 0).prompts(["calm"] * 5, rng)
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert rng.random() == np.random.default_rng(3).random()


@pytest.mark.usefixtures("few_requests")
def test_each_mix_has_the_capacity_of_its_own_prompts() -> None:
    # 2,048 tokens to compute beside 2,048 cached ones, and in the spike 1,024 beside 3,072: one and two in a step.
    size = sizes(Same(4_096, 2_048), "a6000", 0.3, mixes=("calm", "spike"))
    assert size.kv_tokens == 4_096 + 1 + 2_048
    assert size.capacity_per_s["calm"] == pytest.approx(1 / step_time_s(A6000, [(2_048, 2_048)]))
    assert list(size.capacity_per_s) == ["calm", "spike"]
    # The last step has one request alone, of 20.
    spike_s = step_time_s(A6000, [(1_024, 3_072)] * 2) / 2
    assert size.capacity_per_s["spike"] == pytest.approx(1 / spike_s, rel=0.04)


@pytest.mark.usefixtures("few_requests")
def test_output_tokens_lower_the_capacity_by_the_decode_steps() -> None:
    # One request fills the cache, so each is prefilled and decoded alone.
    cold = Same(4_096, 0)
    one, many = (sizes(cold, "a6000", 0.3, output).capacity_per_s["calm"] for output in (1, 5))
    decodes_s = sum(step_time_s(A6000, [(1, 4_096 + number)]) for number in range(4))
    assert one == pytest.approx(1 / prefill_time_s(A6000, 4_096, 2_048))
    assert 1 / many == pytest.approx(1 / one + decodes_s)


@pytest.mark.usefixtures("few_requests")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "recency"])
@pytest.mark.parametrize("seed", [0, 1])
def test_cache_fits_any_request_of_a_long_trace(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "completed_per_s", lambda sample, cluster: 1.0)
    monkeypatch.setattr(sizing, "SIZING_REQUESTS", 400)
    family = Repeatable(FAMILIES[name], seed)
    kv_tokens = sizes(family, "a6000", 0.3).kv_tokens
    prompts = [family.prompts([mix] * 2_000, np.random.default_rng(0)) for mix in ("calm", "spike")]
    longest = max(len(one) for some in prompts for one in some)
    assert longest + 1 <= kv_tokens // sizing.BLOCK_SIZE_TOKENS * sizing.BLOCK_SIZE_TOKENS


def test_sizing_of_a_family_is_measured_once() -> None:
    sizes.cache_clear()
    family = Same(128, 64)
    assert sizes(family, "a6000", 0.3) is sizes(Same(128, 64), "a6000", 0.3)
    assert sizes.cache_info().misses == 1
    sizes.cache_clear()


def test_capacity_is_measured_on_all_of_a_sample_at_once() -> None:
    family = Same(BUDGET, 0)
    late = [
        Arrival(100.0 * number, one.request_id, one.prompt, 1, "all")
        for number, one in enumerate(saturated(SaturatedParams(family, 9), np.random.default_rng(0)))
    ]
    assert completed_per_s(late, SMALL) == pytest.approx(1 / step_time_s(SETTINGS, [(BUDGET, 0)]))
