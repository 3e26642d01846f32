"""Block keys equal what real engines publish, whichever way they publish it."""

import pytest
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


@pytest.mark.parametrize("bad", [-1, 2**64, b"", b"1234567"])
def test_key_of_something_else_is_refused(bad: bytes | int) -> None:
    with pytest.raises(ValueError, match="block hash must"):
        block_key(bad)


def test_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size_tokens must be at least 1, got 0"):
        BlockHasher(0)
