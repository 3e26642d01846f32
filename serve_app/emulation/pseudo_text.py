"""Deterministic pseudo-text: the token at each output position is a pure function of the prompt and the position.

A client that knows the prompt's token ids and the engine's `EmulationSettings` can therefore check every token that an
emulated engine sent: none lost, none swapped between requests, none repeated after a preemption.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from serve_app.emulation.settings import EmulationSettings

DIGEST_BYTES = 8


def prompt_digest(prompt_token_ids: Sequence[int]) -> bytes:
    """8 bytes that stand for the prompt; `prompt_token_ids` (n,), below 2**32."""
    return hashlib.blake2b(np.asarray(prompt_token_ids, dtype="<u4").tobytes(), digest_size=DIGEST_BYTES).digest()


def token_at(settings: EmulationSettings, digest: bytes, position: int) -> int:
    """The token id at output position 0, 1, ... after the prompt with this digest."""
    draw = hashlib.blake2b(digest + position.to_bytes(4, "little"), digest_size=DIGEST_BYTES).digest()
    return settings.text_first_id + int.from_bytes(draw, "little") % settings.text_num_ids


def expected_tokens(settings: EmulationSettings, prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The first `num_tokens` output token ids after the prompt."""
    digest = prompt_digest(prompt_token_ids)
    return [token_at(settings, digest, position) for position in range(num_tokens)]
