"""The token for changes is generated once, printed once and readable by its owner alone."""

import logging
from pathlib import Path

import pytest

from serve_app.deployments.control_token import FILE_NAME, kept_token


def test_first_start_generates_and_prints_once_and_later_starts_are_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ray.serve"):
        token = kept_token(tmp_path / "state")
        assert caplog.text.count(token) == 1
        assert kept_token(tmp_path / "state") == token
        assert caplog.text.count(token) == 1
    assert len(token) >= 32


def test_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    kept_token(tmp_path / "state")
    assert (tmp_path / "state" / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_two_states_have_two_tokens(tmp_path: Path) -> None:
    assert kept_token(tmp_path / "a") != kept_token(tmp_path / "b")


def test_empty_file_is_named_not_taken_as_a_token(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    with pytest.raises(ValueError, match=r"control\.token is empty; delete it"):
        kept_token(tmp_path)
