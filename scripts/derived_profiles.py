"""Write the derived prefill profiles under configs/profiles/: for GPUs that nobody has measured with Llama-3.1-8B.

What they are derived from, and how, is in `serve_app.sim.step_time`; each file says it too. Cost: O(longest prompt /
step) for each length.

    .venv/bin/python scripts/derived_profiles.py
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from serve_app.config import PrefillTable
from serve_app.emulation.step_time import prefill_table
from serve_app.measure_profile import write_table
from serve_app.sim.step_time import DATA_SHEETS, DEVICES

PROFILES = Path(__file__).resolve().parents[1] / "configs" / "profiles"
MODEL = "Llama-3.1-8B"
STEP_TOKENS = 2_048
"""Token budget of an engine step: that of a measurement, and of every experiment."""
LONGEST_TOKENS = 131_072
"""The model's own limit."""
COEFFICIENTS = ("step_base_s", "s_per_token", "s_per_token_context", "s_per_context_token")
NAMES: Mapping[str, str] = MappingProxyType({"a6000": "RTX A6000", "l40": "L40", "h200": "H200 SXM"})
"""Name in `DEVICES` -> NVIDIA's name on the data sheet."""


def derived_profile(device: str) -> PrefillTable:
    """The table of one device in `NAMES`, marked as derived."""
    sheet = DATA_SHEETS[device]
    table = prefill_table(DEVICES[device], STEP_TOKENS, LONGEST_TOKENS)
    source = (
        f"NVIDIA's data sheet of the {NAMES[device]} ({sheet.flops / 1e12:g} dense 16-bit TFLOP/s, "
        f"{sheet.memory_bytes_per_s / 1e9:g} GB/s) and the shape of {MODEL}, by serve_app.sim.step_time, not measured"
    )
    model = DEVICES[device].model_dump_json(include=set(COEFFICIENTS))
    labels = {"device": f"{device.upper()} (derived)", "model": MODEL, "dtype": "bfloat16", "vllm_version": "any"}
    return table.model_copy(
        update={**labels, "derived": f"{source}: step-time model {model}, {STEP_TOKENS:,} tokens a step"}
    )


def profile_path(device: str, directory: Path = PROFILES) -> Path:
    """Where the table of this device lies."""
    return directory / f"{device}-{MODEL.lower()}.json"


def main(directory: Path = PROFILES) -> None:
    """Write one file for each device."""
    for device in NAMES:
        write_table(derived_profile(device), profile_path(device, directory))
        print(profile_path(device, directory))


if __name__ == "__main__":
    main()
