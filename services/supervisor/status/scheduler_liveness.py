"""Whether the scheduler has been silent for so long that it will not speak again. Pure."""

SILENT_S = 20.0
"""Twice the time after which links give a peer up: by then its ranks have ended, and it has not."""

START_S = 60.0
"""One that was started again speaks within a second or two; a busy machine may take longer."""


class SchedulerLiveness:
    """When the scheduler process of the moment was last heard."""

    def __init__(self) -> None:
        self._start = 0
        self._heard_at_s = 0.0
        self._latest_start = 0
        self._latest_at_s = 0.0

    def heard(self, start: int, now_s: float) -> None:
        """Take in that it speaks; `start`: how often it had been started by then."""
        self._start, self._heard_at_s = start, now_s

    def expired(self, start: int, now_s: float) -> bool:
        """Tell whether it should be ended; to be asked again and again.

        Where no scheduler has ever been heard, the fault may be ours: a key that may not ask.
        """
        if start != self._latest_start:
            self._latest_start, self._latest_at_s = start, now_s
        if start == self._start:
            return now_s - self._heard_at_s >= SILENT_S
        return self._start > 0 and now_s - self._latest_at_s >= START_S
