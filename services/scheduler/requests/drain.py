"""Draining: nothing new is accepted, what was accepted goes on. Pure.

Two orders lead there. An operator's holds until it is taken back, and stops nothing. That to stop
ends with the process: when all requests have ended, or their time is over.
"""

_WRITING_S = 5.0
"""How long a scheduler without open requests waits for blocks that are on their way to SSD."""


class Drain:
    """Whether new requests are refused, whether the scheduler is stopping, and since when."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._is_held = False
        self._until_s: float | None = None
        self._idle_since_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Tell whether new requests are refused."""
        return self._is_held or self.is_stopping

    @property
    def is_stopping(self) -> bool:
        """Tell whether an end was ordered."""
        return self._until_s is not None

    def explain(self) -> str:
        """Return why new requests are refused, one sentence; "" when they are not."""
        if self.is_stopping:
            return "The server is stopping and takes no new requests."
        if self._is_held:
            return "The server is drained by an operator and takes no new requests."
        return ""

    def hold(self, *, is_on: bool) -> None:
        """Refuse new requests, or take them again, as an operator orders."""
        self._is_held = is_on

    def stop(self, now_s: float) -> None:
        """Begin to stop; ordered again, stop at once."""
        self._until_s = now_s if self.is_stopping else now_s + self._drain_s

    def is_over(self, now_s: float, *, open_requests: int, is_writing: bool) -> bool:
        """Tell whether it is time to go.

        Args:
            now_s: the time.
            open_requests: how many have not ended.
            is_writing: blocks of requests that have ended are still being kept or spilled.
        """
        if self._until_s is None or now_s >= self._until_s:
            return self.is_stopping
        if open_requests:
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return not is_writing or now_s - self._idle_since_s >= _WRITING_S
