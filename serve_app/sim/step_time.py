"""Step-time models by device name, for simulated engines.

The formula is `serve_app.emulation.step_time`'s, shared with the emulated GPU, its wall-clock twin.
"""

from collections.abc import Mapping

from serve_app.emulation.settings import EmulationSettings

DEVICES: Mapping[str, EmulationSettings] = {"emulated": EmulationSettings()}
"""`emulated`: 5 ms a step and 0.1 ms a token, 1,152 KV blocks, no attention term; a round-numbered stand-in for one GPU
with an 8B model, not a measurement."""
