"""What the workloads draw: token ids, lengths, popularity and times; and the checks of their parameters.

Token ids are uniform over 30,000, so that prompts share what they were given to share: a whole KV block never repeats
by chance. Cost: O(tokens) and O(requests x log(choices)).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 1_000, 30_000


def draw_tokens(count: int, rng: np.random.Generator) -> TokenArray:
    """(count,), token ids."""
    return rng.integers(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKEN_IDS, count, dtype=np.int32)


def with_prefix(prefix: TokenArray, total_tokens: int, rng: np.random.Generator) -> TokenArray:
    """(total_tokens,), the prefix and then tokens of its own."""
    return np.concatenate([prefix, draw_tokens(total_tokens - len(prefix), rng)])


def draw_pieces(lengths_tokens: IntArray, rng: np.random.Generator) -> list[TokenArray]:
    """One array of token ids for each length, at least 0 each."""
    ends = np.cumsum(lengths_tokens)
    tokens = draw_tokens(int(ends[-1]) if len(ends) else 0, rng)
    return [tokens[end - length : end] for end, length in zip(ends.tolist(), lengths_tokens.tolist(), strict=True)]


def uniform_lengths(bounds_tokens: tuple[int, int], count: int, rng: np.random.Generator) -> IntArray:
    """(count,), uniform from the first bound to the second, both included."""
    return rng.integers(*bounds_tokens, count, endpoint=True)


def lognormal_lengths(
    median_tokens: float, sigma: float, bounds_tokens: tuple[int, int], count: int, rng: np.random.Generator
) -> IntArray:
    """(count,), lognormal about the median, then clipped to the bounds."""
    lengths = np.rint(median_tokens * np.exp(sigma * rng.standard_normal(count)))
    return np.clip(lengths, *bounds_tokens).astype(np.int64)


def zipf_weights(num_ranks: int, exponent: float) -> FloatArray:
    """(num_ranks,), probabilities in proportion to 1 / rank^exponent."""
    weights = 1.0 / np.arange(1, num_ranks + 1) ** exponent
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def zipf_ranks(num_ranks: int, exponent: float, count: int, rng: np.random.Generator) -> IntArray:
    """(count,), ranks from 0, the most popular, to num_ranks - 1."""
    return rng.choice(num_ranks, size=count, p=zipf_weights(num_ranks, exponent))


def poisson_times(rate_per_s: float, start_s: float, duration_s: float, rng: np.random.Generator) -> FloatArray:
    """Ascending times of a Poisson process from start_s on; how many there are is drawn too.

    The number comes first, then the times, which are uniform given the number.
    """
    count = int(rng.poisson(rate_per_s * duration_s))
    return start_s + np.sort(rng.uniform(0.0, duration_s, count))


def check_at_least(least: int, params: object, *names: str) -> None:
    """Raises ValueError naming the first field below `least`, its value and its bound."""
    for name in names:
        if not getattr(params, name) >= least:
            raise ValueError(f"{name} is {getattr(params, name)}; it must be at least {least}")


def check_above_zero(params: object, *names: str) -> None:
    """Raises ValueError naming the first field that is not finite and above 0."""
    for name in names:
        if not 0.0 < getattr(params, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(params, name)}; it must be finite and above 0")


def check_from_zero(params: object, *names: str) -> None:
    """Raises ValueError naming the first field that is not finite and at least 0."""
    for name in names:
        if not 0.0 <= getattr(params, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(params, name)}; it must be finite and at least 0")


def check_shares(params: object, *names: str) -> None:
    """Raises ValueError naming the first field that is not from 0 to 1."""
    for name in names:
        if not 0.0 <= getattr(params, name) <= 1.0:
            raise ValueError(f"{name} is {getattr(params, name)}; it must be from 0 to 1")


def check_bounds(least: int, params: object, *names: str) -> None:
    """Raises ValueError naming the first field that is not a pair, least <= first <= second."""
    for name in names:
        bounds: Sequence[int] = getattr(params, name)
        if len(bounds) != 2 or not least <= bounds[0] <= bounds[1]:
            raise ValueError(f"{name} is {bounds}; it must be two numbers, {least} <= first <= second")
