"""Draining. Owns whether new requests are refused and when a stopping scheduler ends. Pure.

An operator's drain lasts until the operator ends it. A drain before a stop ends with the process:
when all requests have ended or the drain time is over.
"""

_WRITING_S = 5.0
"""How long a scheduler without open requests waits for blocks that are being written to SSD."""


class Drain:
    """Decides whether a scheduler refuses new requests and when a stopping one may end."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._is_set_by_operator = False
        self._until_s: float | None = None
        self._idle_since_s: float | None = None

    @property
    def is_on(self) -> bool:
        """Tell whether new requests are refused."""
        return self._is_set_by_operator or self.is_stopping

    @property
    def is_stopping(self) -> bool:
        """Tell whether the scheduler is stopping."""
        return self._until_s is not None

    def explain(self) -> str:
        """Return a sentence on why new requests are refused; "" when they are not."""
        if self.is_stopping:
            return "The server is stopping and takes no new requests."
        if self._is_set_by_operator:
            return "The server is drained by an operator and takes no new requests."
        return ""

    def set_operator_drain(self, *, is_on: bool) -> None:
        """Start or end an operator's drain, which refuses new requests but stops nothing.

        Args:
            is_on: True starts the drain, False ends it.
        """
        self._is_set_by_operator = is_on

    def begin_stop(self, now_s: float) -> None:
        """Begin to stop: refuse new requests, and let open ones run for the drain time at most.

        The drain time is the setting `scheduler.drain_s`. A second call ends it at once.

        Args:
            now_s: the monotonic time in seconds, from which the drain time counts.
        """
        self._until_s = now_s if self.is_stopping else now_s + self._drain_s

    def may_stop(self, now_s: float, *, open_requests: int, is_writing: bool) -> bool:
        """Tell whether a stopping scheduler may end now.

        It may when no requests are open and no blocks are being written, or writing has taken too
        long, or when the drain time is over. A scheduler that is not stopping may not.

        Args:
            now_s: the monotonic time in seconds.
            open_requests: number of requests that have not ended.
            is_writing: blocks of ended requests are still being kept or spilled.
        """
        if self._until_s is None or now_s >= self._until_s:
            return self.is_stopping
        if open_requests:
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return not is_writing or now_s - self._idle_since_s >= _WRITING_S
