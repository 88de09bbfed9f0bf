"""The store's phase: opening, on or off. Owns the times of probes and retries. Pure."""

import enum

from services.cache_store.events import OpenDirectory, ProbeDirectory

PROBE_EVERY_S = 0.5
"""Seconds between probes of the open directory, so that a failure is noticed within a second."""

RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 20.0
"""Longest wait before the directory is opened again; the first is RETRY_FIRST_S, and each failure
doubles it. With up to 10 s to scan 100,000 records, the store is on again within a minute."""

STABLE_S = 60.0
"""Seconds in the phase ON after which the next failure is followed by the shortest wait again."""


class Phase(enum.Enum):
    """Whether the directory is being opened and scanned, is usable (on), or has failed (off)."""

    OPENING = "opening"
    ON = "on"
    OFF = "off"


class Switch:
    """The store's phase, and when to check the open directory or reopen an unusable one.

    A probe is such a check. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self.phase = Phase.OFF
        self.cause = "The store is starting."
        """Why the store is off; "" while it is on."""
        self._due_at_s = float("-inf")
        self._on_at_s = float("inf")
        self._retry_s = RETRY_FIRST_S

    def is_due(self, now_s: float) -> bool:
        """Return True when it is time to probe the directory (on) or to open it again (off)."""
        return self.phase is not Phase.OPENING and now_s >= self._due_at_s

    def start_check(self, now_s: float) -> ProbeDirectory | OpenDirectory:
        """Return the action that is due: a probe while on, else opening the directory again.

        The next probe is due PROBE_EVERY_S after `now_s`. Opening enters the phase OPENING, in
        which nothing is due until the result is known.
        """
        if self.phase is Phase.ON:
            self._due_at_s = now_s + PROBE_EVERY_S
            return ProbeDirectory()
        self.phase = Phase.OPENING
        return OpenDirectory()

    def turn_on(self, now_s: float) -> None:
        """Enter the phase ON, and make the first probe due PROBE_EVERY_S after `now_s`."""
        self.phase = Phase.ON
        self.cause = ""
        self._on_at_s = now_s
        self._due_at_s = now_s + PROBE_EVERY_S

    def turn_off(self, cause: str, now_s: float) -> None:
        """Enter the phase OFF, and set the time at which the directory is opened again.

        Args:
            cause: why the directory cannot be used, as a sentence.
            now_s: the time, from which a wait counts that doubles with each failure up to
                RETRY_LONGEST_S.
        """
        if now_s - self._on_at_s >= STABLE_S:
            self._retry_s = RETRY_FIRST_S
        self.phase = Phase.OFF
        self.cause = cause
        self._on_at_s = float("inf")
        self._due_at_s = now_s + self._retry_s
        self._retry_s = min(2.0 * self._retry_s, RETRY_LONGEST_S)
