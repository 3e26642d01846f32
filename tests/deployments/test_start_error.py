"""One line of status for a replica that cannot start."""

import logging
import sys
import traceback

import pytest

from serve_app.deployments.start_error import MAX_CHARS, ReplicaStartError, start_error


def test_many_lines_become_one_bounded_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "tracebacklimit", 1_000, raising=False)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        try:
            try:
                raise ValueError("first line\n  second line " + "x" * 5_000)
            except ValueError as error:
                raise start_error(error) from None
        except ReplicaStartError:
            status = traceback.format_exc()
    lines = [line for line in status.splitlines() if line]
    assert len(lines) <= 2  # at most a heading before it
    assert "ValueError: first line second line" in lines[-1]
    assert len(lines[-1]) < MAX_CHARS + 100
    assert "second line" in caplog.text
