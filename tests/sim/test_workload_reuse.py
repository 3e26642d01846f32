"""What repeats in a workload, against walks over the block chains that are slow and obvious."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.sim.arrivals import Arrival, GspParams, gsp
from serve_app.sim.workloads import FAMILIES, SaturatedParams, infinite_cache_hit_rate, reusable_tokens, saturated

Prompts = list[list[int]]
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=12)


def arrivals_of(prompts: Prompts) -> list[Arrival]:
    return [
        Arrival(float(number), f"r-{number}", np.asarray(prompt, dtype=np.int32), 1, "all")
        for number, prompt in enumerate(prompts)
    ]


def chains(prompt: list[int], block: int) -> list[tuple[int, ...]]:
    return [tuple(prompt[:end]) for end in range(block, len(prompt) + 1, block)]


def slow_reusable_tokens(prompts: Prompts, block: int) -> int:
    uses = Counter(chain for prompt in prompts for chain in chains(prompt, block))
    return block * sum(count >= 2 for count in uses.values())


def slow_hit_rate(prompts: Prompts, block: int) -> float:
    seen: set[tuple[int, ...]] = set()
    hit_tokens = 0
    for prompt in prompts:
        hit_tokens += block * sum(chain in seen for chain in chains(prompt[:-1], block))
        seen.update(chains(prompt, block))
    return hit_tokens / max(1, sum(map(len, prompts)))


@given(PROMPTS, st.integers(1, 3))
def test_reusable_tokens_are_those_of_chains_in_two_prompts(prompts: Prompts, block: int) -> None:
    assert reusable_tokens(arrivals_of(prompts), block) == slow_reusable_tokens(prompts, block)


@given(PROMPTS, st.integers(1, 3))
def test_infinite_cache_hits_what_an_earlier_prompt_had(prompts: Prompts, block: int) -> None:
    assert infinite_cache_hit_rate(arrivals_of(prompts), block) == pytest.approx(slow_hit_rate(prompts, block))


@pytest.mark.parametrize("family", FAMILIES)
def test_reuse_of_each_family_is_what_the_walk_finds(family: str) -> None:
    arrivals = saturated(SaturatedParams(FAMILIES[family], 40), np.random.default_rng(4))
    # Blocks by themselves, numbered, so that the walk's chains stay short.
    numbers: dict[bytes, int] = {}
    prompts = [
        [
            numbers.setdefault(one.prompt[at : at + 16].tobytes(), len(numbers))
            for at in range(0, len(one.prompt) - 15, 16)
        ]
        for one in arrivals
    ]
    assert reusable_tokens(arrivals) == 16 * slow_reusable_tokens(prompts, 1)
    assert reusable_tokens(arrivals) > 0


def test_gsp_hits_its_ideal_share_when_prefixes_are_whole_blocks() -> None:
    params = GspParams(num_groups=4, prompts_per_group=5, prompt_tokens=(64, 128))
    arrivals = gsp(params, np.random.default_rng(0))
    assert infinite_cache_hit_rate(arrivals) == pytest.approx(params.ideal_hit_rate)
    assert reusable_tokens(arrivals) == 2 * (32 + 64)


def test_prompt_seen_before_is_hit_but_for_its_last_block() -> None:
    assert infinite_cache_hit_rate(arrivals_of([[1, 2, 3, 4], [1, 2, 3, 4]]), 2) == 2 / 8


def test_no_arrivals_reuse_nothing() -> None:
    assert reusable_tokens([]) == 0
    assert infinite_cache_hit_rate([]) == 0.0


def test_block_size_below_one_is_refused() -> None:
    for count in (reusable_tokens, infinite_cache_hit_rate):
        with pytest.raises(ValueError, match="block_size_tokens is 0"):
            count([], 0)
