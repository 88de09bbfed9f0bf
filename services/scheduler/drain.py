"""Draining: nothing new is accepted, what was accepted finishes, then the scheduler stops."""

_WRITING_S = 5.0
"""How long a scheduler without open requests waits for blocks that are on their way to SSD."""


class Drain:
    """Whether the scheduler is stopping, and since when."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._until_s: float | None = None
        self._idle_since_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Tell whether an end was ordered."""
        return self._until_s is not None

    def order(self, now_s: float) -> None:
        """Begin to stop; ordered again, stop at once."""
        self._until_s = now_s if self.is_on else now_s + self._drain_s

    def is_over(self, now_s: float, *, open_requests: int, is_writing: bool) -> bool:
        """Tell whether it is time to go.

        Args:
            now_s: the time.
            open_requests: how many have not ended.
            is_writing: blocks of requests that have ended are still being kept or spilled.
        """
        if self._until_s is None or now_s >= self._until_s:
            return self.is_on
        if open_requests:
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return not is_writing or now_s - self._idle_since_s >= _WRITING_S
