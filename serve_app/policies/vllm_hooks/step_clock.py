"""What a prefill is expected to take: from the configured profile, or learned from the engine's own steps."""

import logging

from vllm.v1.core.sched.output import SchedulerOutput

from serve_app.config import EnginePolicy
from serve_app.policies.online_prefill import OnlinePrefill
from serve_app.policies.prefill_profile import ExpectedPrefill, PrefillProfile

logger = logging.getLogger("vllm.fairway")


class StepClock:
    """Times the steps of a busy engine where no profile is configured; else it is not to be told of any."""

    profile: ExpectedPrefill
    is_learning: bool
    """Whether there is no profile, so that each step is to be told of."""

    def __init__(self, policy: EnginePolicy) -> None:
        self._estimate: OnlinePrefill | None = None
        self._last: tuple[float, int, int] | None = None
        """When the step before began, and its tokens of prefill and of decode."""
        self.is_learning = policy.prefill_profile is None
        if policy.prefill_profile is not None:
            self.profile = PrefillProfile(policy.prefill_profile)
            return
        self.profile = self._estimate = OnlinePrefill()
        logger.warning("fairway-serve: no prefill_profile is configured, %s", self._estimate.table.derived)

    def begins(self, now_s: float, is_idle: bool) -> None:
        """A step begins: the time since the last one is what that one took, unless the engine was idle in between."""
        assert self._estimate is not None
        if is_idle:
            self._last = None
            self._estimate.pause()
        elif self._last is not None:
            began_s, prefill_tokens, decode_tokens = self._last
            self._estimate.observe(now_s - began_s, prefill_tokens, decode_tokens)
        self._last = (now_s, 0, 0)

    def scheduled(self, output: SchedulerOutput) -> None:
        """What the step that began computes; each request's last token is counted as a decode."""
        if self._last is not None:
            num_requests = len(output.num_scheduled_tokens)
            self._last = (self._last[0], output.total_num_scheduled_tokens - num_requests, num_requests)
