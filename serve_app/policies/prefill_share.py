"""How much of a step a running prefill may take while short requests wait.

vLLM serves running requests first, so a prefill of 100,000 tokens fills every step for seconds, whatever the order of
the waiting queue. Here a part of each step, at most 1 - `share` of what it has left for prefill, is kept for the
requests at the front of the queue that can be computed whole in it. Whole, since a request that only begins is one
more prefill that fills the steps to come: sharing a step among prefills that outlast it makes all of them late (held to
a half without this rule, 11 of 11 scenarios had their p99 up to 19 times as long). What passes a running prefill is
charged to its account (`overtaking`), and one that is due is not held. Ours; cost O(requests that fit).
"""

from collections.abc import Iterable


def running_prefill_cap(
    share: float, step_tokens: int, num_decodes: int, num_prefills: int, waiting_tokens: Iterable[int]
) -> int | None:
    """Most tokens of one running prefill in this step; None: no limit.

    share: of the step's prefill tokens that running prefills have in any case, above 0, at most 1 (no limit).
    step_tokens: the step's token budget. num_decodes, num_prefills: running requests of each kind.
    waiting_tokens: what each waiting request has to compute, in the order in which they go.
    """
    left_tokens = step_tokens - num_decodes
    if share >= 1 or num_prefills < 1 or left_tokens < 2:
        return None
    for_waiting = 0
    for tokens in waiting_tokens:
        for_both = for_waiting + tokens
        cap = (left_tokens - for_both) // num_prefills
        # vLLM holds waiting requests to the same cap.
        if for_both > (1 - share) * left_tokens or tokens > cap:
            break
        for_waiting = for_both
    return (left_tokens - for_waiting) // num_prefills if for_waiting else None
