"""Settings of the emulated GPU: vLLM's `additional_config["emulation"]`, and what the simulator's engines take."""

from typing import Annotated

from pydantic import Field

from serve_app.emulation.faults import Faults
from serve_app.settings import Settings

StepSeconds = Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)]


class EmulationSettings(Settings):
    """How long an emulated engine step takes, how many KV blocks there are, and what the pseudo-text is made of."""

    step_base_s: StepSeconds = 0.005
    """Seconds of every engine step that runs any token, whatever is in it."""
    s_per_token: StepSeconds = 1e-4
    """Seconds for each token of the step, prefill or decode."""
    s_per_token_context: StepSeconds = 0.0
    """Seconds for each (token, token that it attends to) pair: attention's arithmetic; 0 leaves it out."""
    s_per_context_token: StepSeconds = 0.0
    """Seconds for each token in the KV cache before a request's chunk, once a request and step: attention's reading of
    the cache, which is most of it in decode; 0 leaves it out."""
    time_scale: float = Field(default=1.0, gt=0, le=1_000, allow_inf_nan=False)
    """Multiplies every step's duration; above 1 where emulated engines share too few cores to keep time."""
    kv_blocks: int = Field(default=1_152, ge=2, le=100_000_000)
    """KV blocks in the pool, vLLM's null block included."""
    text_first_id: int = Field(default=1_000, ge=0, le=10_000_000)
    """Smallest token id of the pseudo-text; keep clear of the tokenizer's special ids."""
    text_num_ids: int = Field(default=8_192, ge=1, le=10_000_000)
    """Number of distinct token ids in the pseudo-text."""
    faults: Faults = ()
    """Crashes, hangs and slow-downs at given engine steps; none by default. Each replica has them all."""
