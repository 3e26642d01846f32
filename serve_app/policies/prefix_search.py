"""How long a prefix is cached, asked block by block, starting from the last answer."""

from collections.abc import Callable


def longest_prefix(holds: Callable[[int], bool], length: int, guess: int) -> int:
    """How many leading indices below `length` hold, where nothing holds after the first that doesn't.

    Two calls when `guess` is right, O(log length) else.
    """
    low = min(guess, length)
    high = length
    if low and not holds(low - 1):
        low, high = 0, low - 1
    stride = 1
    while low < high:
        probe = min(low + stride, high)
        if holds(probe - 1):
            low, stride = probe, 2 * stride
        else:
            high = probe - 1
            stride = max(1, (high - low + 1) // 2)
    return low
