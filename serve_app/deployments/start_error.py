"""A replica that cannot start says why in one line of `serve status`; the traceback stands in its own log."""

import logging
import sys

logger = logging.getLogger("ray.serve")

MAX_CHARS = 600


class ReplicaStartError(RuntimeError):
    """A replica could not start; the message is one line that says why."""


def start_error(error: Exception) -> ReplicaStartError:
    """What to raise `from None` in a replica's constructor in the place of `error`, whose traceback is logged.

    Serve copies the whole traceback into the status. The process ends with this error, so its limit can go.
    """
    logger.error("This replica could not start", exc_info=error)
    sys.tracebacklimit = 0
    return ReplicaStartError(f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_CHARS]}")
