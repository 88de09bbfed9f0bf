"""Whether the scheduler itself was held up: stopped, swapped out, or its machine asleep. Pure.

What ranks have sent meanwhile waits in a socket and is read only after the clock was. So a time in
which nobody looked does not count as one in which nobody answered.
"""

LATE_S = 2.0
"""The clock is looked at 50 times a second. A busy machine delays that, but not by so much."""


class StallDetector:
    """Compares each look at the clock with the one before."""

    def __init__(self) -> None:
        self._looked_at_s: float | None = None

    def held_up_s(self, now_s: float) -> float:
        """Take in a look at the clock; return how late it comes, 0 when it is in time."""
        before_s, self._looked_at_s = self._looked_at_s, now_s
        gap_s = 0.0 if before_s is None else now_s - before_s
        return gap_s if gap_s > LATE_S else 0.0
