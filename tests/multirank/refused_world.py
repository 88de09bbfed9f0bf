"""Worlds of two real ranks that must never serve."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from shared.messages import StatusReported
from tests.chaos.parts import Parts

ROLES = ("scheduler", "rank 0", "rank 1")
DEADLINE_S = 200.0
"""Two starts, one after the other; each may take as long as `READY_DEADLINE_S`."""

P = TypeVar("P", bound=Parts)


@contextmanager
def running(parts: P) -> Iterator[P]:
    """Start a world; roles that end are started again, as launchd would."""
    try:
        parts.launch()
        yield parts
    finally:
        parts.close()
        parts.remove()


def given_up(parts: Parts) -> StatusReported:
    """Wait until no further epoch is tried; nobody may be served before."""
    until_s = time.monotonic() + DEADLINE_S
    while True:
        assert time.monotonic() < until_s, f"not given up: {parts.log.tail()}"
        status = parts.try_status()
        if status is not None:
            assert not status.ready
            if status.failure:
                return status
