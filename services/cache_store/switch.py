"""Whether the store is on, and when it tries again after it has switched itself off. Pure."""

import enum

PROBE_EVERY_S = 0.5
"""A disk that fails is noticed within a second, whoever meets it first."""

RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 20.0
"""With up to 10 s to read 100,000 records, the store is on again within a minute."""

FORGIVEN_S = 60.0
"""A directory that was fine for so long is tried again soon when it fails."""


class Phase(enum.Enum):
    """What the store does."""

    OPENING = "opening"
    ON = "on"
    OFF = "off"


class Switch:
    """The phases in time. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.phase = Phase.OFF
        self.cause = "The store is starting."
        self._due_at_s = float("-inf")
        self._on_at_s = float("inf")
        self._retry_s = RETRY_FIRST_S

    def is_due(self, now_s: float) -> bool:
        """Tell whether to probe (on) or to try again (off) now."""
        return self.phase is not Phase.OPENING and now_s >= self._due_at_s

    def opening(self) -> None:
        """The directory is being opened."""
        self.phase = Phase.OPENING

    def probing(self, now_s: float) -> None:
        """The directory is being probed."""
        self._due_at_s = now_s + PROBE_EVERY_S

    def turn_on(self, now_s: float) -> None:
        """The directory is open."""
        self.phase = Phase.ON
        self.cause = ""
        self._on_at_s = now_s
        self._due_at_s = now_s + PROBE_EVERY_S

    def turn_off(self, cause: str, now_s: float) -> None:
        """The directory cannot be used; `cause` is a sentence."""
        if now_s - self._on_at_s >= FORGIVEN_S:
            self._retry_s = RETRY_FIRST_S
        self.phase = Phase.OFF
        self.cause = cause
        self._on_at_s = float("inf")
        self._due_at_s = now_s + self._retry_s
        self._retry_s = min(2.0 * self._retry_s, RETRY_LONGEST_S)
