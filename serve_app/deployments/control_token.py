"""The bearer token for changes: made once when none is configured, shown once, kept for the owner's eyes only."""

import logging
import os
import secrets
from pathlib import Path

logger = logging.getLogger("ray.serve")

FILE_NAME = "control.token"


def kept_token(state_dir: Path) -> str:
    """The token of an earlier start, or a new one; a new one is printed to the log this once.

    Raises:
        ValueError: the file of an earlier start is empty.
    """
    path = state_dir / FILE_NAME
    if path.is_file():
        token = path.read_text().strip()
        if not token:
            raise ValueError(f"{path} is empty; delete it to have a new token generated")
        return token
    token = secrets.token_urlsafe(24)
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    logger.warning("No control token is configured. Generated one, shown only this once: %s (kept in %s)", token, path)
    return token
