"""A node without direct streaming is refused with the names, values and fix."""

import pytest

from serve_app.environment import DEFAULT_ENV, REQUIRED_ENV, EnvironmentMissing, check_environment


def test_complete_environment_passes() -> None:
    check_environment({**REQUIRED_ENV, "OTHER": "x"})


@pytest.mark.parametrize("name", sorted(REQUIRED_ENV))
def test_each_missing_or_wrong_variable_is_named_with_its_fix(name: str) -> None:
    for wrong in ({k: v for k, v in REQUIRED_ENV.items() if k != name}, {**REQUIRED_ENV, name: "wrong"}):
        with pytest.raises(EnvironmentMissing, match=f"{name}=.*needs '{REQUIRED_ENV[name]}'.*ray start"):
            check_environment(wrong)


def test_scripts_set_all_that_is_required_and_two_ingress_replicas() -> None:
    assert REQUIRED_ENV.items() <= DEFAULT_ENV.items()
    assert DEFAULT_ENV["RAY_SERVE_INGRESS_ROUTER_REPLICAS_PER_NODE"] == "2"
