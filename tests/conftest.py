"""What tests of several rooms share."""

import os
from pathlib import Path

import pytest

from serve_app.config import ModelSettings
from serve_app.model_files import why_incomplete


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The real model, for tests marked `model`; `scripts/test` makes it before it runs them."""
    directory = Path(os.environ.get("FAIRWAY_TEST_MODEL", ModelSettings().source)).expanduser()
    if (why := why_incomplete(directory)) is not None:
        pytest.fail(f"{why}; run `fairway-serve prepare-model`", pytrace=False)
    return directory
