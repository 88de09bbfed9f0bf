"""The store's phase: opening, on or off. Owns the times of probes and retries. Pure."""

import enum

PROBE_EVERY_S = 0.5
"""A disk failure is noticed within a second."""

RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 20.0
"""With up to 10 s to scan 100,000 records, the store is on again within a minute."""

STABLE_S = 60.0
"""A directory that was usable for this long is tried again soon after a failure."""


class Phase(enum.Enum):
    """What the store is doing."""

    OPENING = "opening"
    ON = "on"
    OFF = "off"


class Switch:
    """The phase over time. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.phase = Phase.OFF
        self.cause = "The store is starting."
        """Why the store is off; "" while it is on."""
        self._due_at_s = float("-inf")
        self._on_at_s = float("inf")
        self._retry_s = RETRY_FIRST_S

    def is_due(self, now_s: float) -> bool:
        """Return True when it is time to probe (on) or to open the directory again (off)."""
        return self.phase is not Phase.OPENING and now_s >= self._due_at_s

    def start_opening(self) -> None:
        """Record that the directory is being opened."""
        self.phase = Phase.OPENING

    def schedule_probe(self, now_s: float) -> None:
        """Set the time of the next probe."""
        self._due_at_s = now_s + PROBE_EVERY_S

    def turn_on(self, now_s: float) -> None:
        """Record that the directory is open."""
        self.phase = Phase.ON
        self.cause = ""
        self._on_at_s = now_s
        self._due_at_s = now_s + PROBE_EVERY_S

    def turn_off(self, cause: str, now_s: float) -> None:
        """Record that the directory cannot be used; `cause` is a sentence."""
        if now_s - self._on_at_s >= STABLE_S:
            self._retry_s = RETRY_FIRST_S
        self.phase = Phase.OFF
        self.cause = cause
        self._on_at_s = float("inf")
        self._due_at_s = now_s + self._retry_s
        self._retry_s = min(2.0 * self._retry_s, RETRY_LONGEST_S)
