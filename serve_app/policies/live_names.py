"""Names under which a running engine reads and changes its policy.

They are utilities of vLLM's engine core (`vllm_hooks.live`), called by name from the process in front of it, which has
no need of the scheduler and so imports nothing but this.
"""

CHANGE_POLICY = "fairway_change_policy"
"""Takes a mapping of `config.LIVE_FIELDS` to values; answers as `POLICY_STATS` does."""
POLICY_STATS = "fairway_policy_stats"
"""Takes nothing; answers the policy in force and what waits, as a mapping."""
