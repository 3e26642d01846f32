"""Block keys equal what real engines publish, whichever way they publish it, and vLLM's own hasher computes."""

import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import envs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from serve_app.router.block_hashes import BlockHasher, block_key, seed_fingerprint

BLOCK = 16
TOKENS = [(7 * i) % 50_000 for i in range(100)]


EDGES = [0, 1, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**40, -1, -129, -(2**31), -(2**31) - 1]
"""Where pickle begins to write an integer another way, and what is no token id at all."""
TOKEN_IDS = st.one_of(st.integers(0, 150_000), st.integers(0, 300), st.integers(0, 2**31 - 1))


def vllm_hashes(
    token_ids: Sequence[int], block_size_tokens: int, cache_salt: str | None = None, lora_name: str | None = None
) -> list[bytes]:
    """By vLLM's own hasher, of what it reads of a request."""
    init_none_hash(sha256)
    request = SimpleNamespace(
        all_token_ids=token_ids,
        num_tokens=len(token_ids),
        cache_salt=cache_salt,
        lora_request=SimpleNamespace(lora_name=lora_name) if lora_name else None,
        mm_features=(),
        prompt_embeds=None,
        block_hashes=[],
    )
    hashes: list[bytes] = get_request_block_hasher(block_size_tokens, sha256)(request)
    return hashes


def vllm_keys(token_ids: Sequence[int], block_size_tokens: int, *extra: str | None) -> tuple[bytes, ...]:
    return tuple(one[-8:] for one in vllm_hashes(token_ids, block_size_tokens, *extra))


def vllm_request(token_ids: list[int], cache_salt: str | None = None, lora_name: str | None = None) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id="r",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(lora_name, 1, "/nowhere") if lora_name else None,
        cache_salt=cache_salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 96, 100])
@pytest.mark.parametrize(("cache_salt", "lora_name"), [(None, None), ("salt", None), (None, "lora"), ("salt", "lora")])
def test_keys_are_the_last_eight_bytes_of_a_real_requests_hashes(
    num_tokens: int, cache_salt: str | None, lora_name: str | None
) -> None:
    request = vllm_request(TOKENS[:num_tokens], cache_salt, lora_name)
    keys = BlockHasher(BLOCK).hashes(TOKENS[:num_tokens], cache_salt, lora_name)
    assert len(keys) == num_tokens // BLOCK
    assert list(keys) == [block_hash[-8:] for block_hash in request.block_hashes]


@pytest.mark.parametrize("published_as_int", ["0", "1"])
def test_keys_match_the_stored_event_of_a_real_block_pool(
    published_as_int: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not the variable itself: vLLM remembers what it read once an engine was made in this process.
    monkeypatch.setitem(vars(envs), "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", published_as_int == "1")
    request = vllm_request(TOKENS)
    pool = BlockPool(num_gpu_blocks=20, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(7), 0, 6, BLOCK, 0)
    (event,) = pool.take_events()
    assert {type(one) for one in event.block_hashes} == {int if published_as_int == "1" else bytes}
    assert tuple(map(block_key, event.block_hashes)) == BlockHasher(BLOCK).hashes(TOKENS)


def test_prompts_share_the_keys_of_their_common_prefix_only() -> None:
    hasher = BlockHasher(BLOCK)
    other = TOKENS[:40] + [1] * 60
    assert hasher.hashes(TOKENS)[:2] == hasher.hashes(other)[:2]
    assert not set(hasher.hashes(TOKENS)[2:]) & set(hasher.hashes(other)[2:])
    assert not set(hasher.hashes(TOKENS)) & set(hasher.hashes(TOKENS, cache_salt="mine"))


def test_fingerprint_and_keys_follow_the_hash_seed_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    fingerprint, keys = seed_fingerprint(), BlockHasher(BLOCK).hashes(TOKENS)
    assert seed_fingerprint() == fingerprint
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert seed_fingerprint() != fingerprint
    assert not set(BlockHasher(BLOCK).hashes(TOKENS)) & set(keys)
    monkeypatch.undo()
    BlockHasher(BLOCK)  # leaves vLLM's global root as the process' own seed gives it


def test_fingerprint_leaves_the_root_of_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hasher = BlockHasher(BLOCK)
    keys = hasher.hashes(TOKENS)
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    seed_fingerprint()
    assert hasher.hashes(TOKENS) == keys


@given(
    token_ids=st.lists(TOKEN_IDS, max_size=600),
    block_size_tokens=st.integers(1, 40),
    cache_salt=st.one_of(st.none(), st.text(max_size=300)),
    lora_name=st.one_of(st.none(), st.text(max_size=300)),
)
def test_hashes_of_any_prompt_are_those_of_vllms_hasher(
    token_ids: list[int], block_size_tokens: int, cache_salt: str | None, lora_name: str | None
) -> None:
    hasher = BlockHasher(block_size_tokens)
    whole = vllm_hashes(token_ids, block_size_tokens, cache_salt, lora_name)
    assert hasher.whole_hashes(token_ids, cache_salt, lora_name) == whole
    for _ in range(2):  # the second time by the memo
        assert hasher.hashes(token_ids, cache_salt, lora_name) == tuple(one[-8:] for one in whole)


@given(st.lists(st.one_of(st.sampled_from(EDGES), st.integers(), st.booleans()), max_size=300), st.integers(1, 20))
def test_integers_of_every_width_hash_as_in_vllm(token_ids: list[int], block_size_tokens: int) -> None:
    assert BlockHasher(block_size_tokens).whole_hashes(token_ids) == vllm_hashes(token_ids, block_size_tokens)


@pytest.mark.parametrize("block_size_tokens", [1, 3, 4, 16, 32, 128, 784, 4_096, 16_384])
def test_long_prompts_hash_as_in_vllm_at_every_block_size(block_size_tokens: int) -> None:
    rng = random.Random(block_size_tokens)
    hasher = BlockHasher(block_size_tokens)
    for vocabulary in (200, 40_000, 150_000, 2**31):
        token_ids = [rng.randrange(vocabulary) for _ in range(33_000)]
        keys = vllm_keys(token_ids, block_size_tokens, "salt", "lora")
        assert hasher.hashes(token_ids, "salt", "lora") == hasher.hashes(token_ids, "salt", "lora") == keys


def test_remembered_prefix_gives_the_same_keys_to_every_prompt_that_shares_it() -> None:
    rng, hasher = random.Random(0), BlockHasher(BLOCK, memo_runs=40)
    documents = [[rng.randrange(150_000) for _ in range(2_000)] for _ in range(4)]
    for _ in range(60):
        prompt = rng.choice(documents)[: rng.randrange(2_001)] + [rng.randrange(99) for _ in range(rng.randrange(900))]
        extra = rng.choice([(None, None), ("salt", None), ("other", None), (None, "lora"), ("salt", "lora")])
        assert hasher.hashes(prompt, *extra) == vllm_keys(prompt, BLOCK, *extra)
        assert hasher.num_remembered <= 40
    assert hasher.num_remembered == 40


def test_memo_forgets_the_least_recently_used_run_and_none_remembers_nothing() -> None:
    hasher, none = BlockHasher(BLOCK, memo_runs=2), BlockHasher(BLOCK, memo_runs=0)
    run = BLOCK * 32
    for first in (1, 2, 1, 3):
        assert hasher.hashes([first] * run) == none.hashes([first] * run) == vllm_keys([first] * run, BLOCK)
    assert [key.packed[0] for key in hasher._memo] == [1, 3]
    assert none.num_remembered == 0


def test_numpy_integers_never_get_into_the_memo_of_python_integers() -> None:
    hasher, run = BlockHasher(BLOCK), [7] * (BLOCK * 32)
    assert hasher.whole_hashes(list(np.array(run))) == vllm_hashes(list(np.array(run)), BLOCK)
    hasher.hashes(list(np.array(run)))
    assert hasher.hashes(run) == vllm_keys(run, BLOCK)


@pytest.mark.parametrize("bad", [-1, 2**64, b"", b"1234567"])
def test_key_of_something_else_is_refused(bad: bytes | int) -> None:
    with pytest.raises(ValueError, match="block hash must"):
        block_key(bad)


def test_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size_tokens must be at least 1, got 0"):
        BlockHasher(0)


def test_negative_memo_is_refused() -> None:
    with pytest.raises(ValueError, match="memo_runs must be at least 0, got -1"):
        BlockHasher(BLOCK, memo_runs=-1)
