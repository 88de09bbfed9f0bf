"""Stall detector. Owns noticing that the scheduler did not run: suspended or machine asleep. Pure.

Messages that ranks sent during a stall are read after the clock, so the time of a stall must not
count towards deadlines.
"""

STALL_S = 2.0
"""Shortest gap between two ticks that counts as a stall. There are 20 ticks per second, and a busy
machine delays them by less than this."""


class StallDetector:
    """Detects gaps between ticks that are long enough to mean that the scheduler did not run."""

    def __init__(self) -> None:
        self._ticked_at_s: float | None = None

    def stalled_for_s(self, now_s: float) -> float:
        """Record a tick; return the seconds since the last one if the scheduler stalled, else 0.

        Args:
            now_s: time of the tick in seconds. A gap of more than STALL_S to the tick before is a
                stall.
        """
        before_s, self._ticked_at_s = self._ticked_at_s, now_s
        gap_s = 0.0 if before_s is None else now_s - before_s
        return gap_s if gap_s > STALL_S else 0.0
