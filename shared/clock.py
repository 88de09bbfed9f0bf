"""Sources of monotonic time, passed in as values. Deadlines never depend on the wall clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time for deadlines: the machine's clock, or one that a test advances."""

    def now(self) -> float:
        """Return monotonic seconds."""
        ...


class SystemClock:
    """Clock of the machine, which only moves forward."""

    def now(self) -> float:
        """Return monotonic seconds, which are unaffected by changes of the date."""
        return time.monotonic()


class ManualClock:
    """Clock that only a test advances."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return this clock's time in seconds: the start time plus all advances."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds`, which is 0 or more."""
        assert seconds >= 0.0
        self._now_s += seconds


def unix_time_s() -> float:
    """Return seconds since 1970, for display only. Never use it for deadlines."""
    return time.time()


def unix_seconds() -> int:
    """Return whole seconds since 1970, as `unix_time_s`."""
    return int(unix_time_s())
