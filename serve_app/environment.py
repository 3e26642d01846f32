"""Environment variables that Ray's direct-streaming mode reads when its processes start.

They decide the data path for a whole node, so they must be set where `ray start` runs (our scripts and cluster files do
that); an application cannot set them for itself. The builder stops when one is missing or differs.
"""

from collections.abc import Mapping

REQUIRED_ENV: dict[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "PYTHONHASHSEED": "0",
}
"""Exact values; what each is for stands in docs/design.md, "The data path"."""

DEFAULT_ENV: dict[str, str] = {
    **REQUIRED_ENV,
    "RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE": "2",
}
"""What our scripts set: the required ones, and two ingress replicas so that one may fail."""


class EnvironmentMissing(RuntimeError):
    """A variable of `REQUIRED_ENV` is unset or has another value."""


def check_environment(environ: Mapping[str, str]) -> None:
    """Stop a start that would silently take another data path.

    Raises:
        EnvironmentMissing: names every variable that is wrong, its value, the value needed, and the fix.
    """
    wrong = [f"{name}={environ.get(name, '')!r} (needs {value!r})" for name, value in _differing(environ).items()]
    if wrong:
        fix = " ".join(f"{name}={value}" for name, value in REQUIRED_ENV.items())
        raise EnvironmentMissing(
            f"fairway-serve needs Ray's direct-streaming mode, but on this node {', '.join(wrong)}. "
            f"Start every Ray node with: {fix} ray start ... (`source scripts/env.sh` sets them)"
        )


def _differing(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in REQUIRED_ENV.items() if environ.get(name) != value}
