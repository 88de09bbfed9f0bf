"""Time as a value that is passed in: monotonic seconds. Deadlines never follow the wall clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell takes the time from before it calls a core."""

    def now(self) -> float:
        """Return monotonic seconds."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return monotonic seconds; not affected by changes of the date."""
        return time.monotonic()


class ManualClock:
    """A clock that a test moves."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the time that was set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds` (0 or more)."""
        assert seconds >= 0.0
        self._now_s += seconds


def unix_seconds() -> int:
    """Return the date as whole seconds since 1970, for what people read. Never for deadlines."""
    return int(time.time())
