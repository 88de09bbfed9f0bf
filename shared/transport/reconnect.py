"""When a dialler connects anew: ZeroMQ gives up after a handshake that was refused.

Pure: told of failures, sessions and the time, it answers whether to dial again, and complains.
"""

from shared import limits
from shared.clock import Clock
from shared.log import Log
from shared.transport.authentication import RefusalLog

AFTER_REFUSAL_S = 1.0
"""A handshake that was refused is tried again so soon: the key may have been allowed since."""

WITHOUT_SESSION_S = limits.PEER_SILENCE_S
"""A connection without a session is given up so soon, for one with a fresh identity: a listener
ignores a connection while another, that died without a word, still holds its identity."""

HANG_UPS_BEFORE_WARNING = 3
"""A listener that restarts hangs up once or twice; one with another key does nothing else."""


class ReconnectPolicy:
    """One dialler's patience."""

    def __init__(self, address: str, own_key: str, clock: Clock, log: Log) -> None:
        """Begin without a session; `own_key` is public, or "none"."""
        self.failures = 0
        """Handshakes that failed, all in all."""
        self.cause = ""
        """Why the last of them did."""
        self._address = address
        self._own_key = own_key
        self._clock = clock
        self._complaints = RefusalLog(clock, log)
        self._due_at_s = 0.0
        self._hang_ups = 0
        self.lost()

    def lost(self, *, is_silent: bool = False) -> None:
        """Note that there is no session from now on; a connection that was silent is no good."""
        self._due_at_s = self._clock.now() + (0.0 if is_silent else WITHOUT_SESSION_S)
        self._hang_ups = 0

    def is_due(self, failures: list[tuple[str, bool]]) -> bool:
        """Tell whether to dial again now, while there is no session.

        Args:
            failures: of handshakes since the last call: the cause, and whether ZeroMQ gave up.
        """
        now_s = self._clock.now()
        for cause, gave_up in failures:
            self.failures += 1
            self.cause = cause
            self._hang_ups += not gave_up
            if gave_up:
                self._due_at_s = min(self._due_at_s, now_s + AFTER_REFUSAL_S)
            if gave_up or self._hang_ups >= HANG_UPS_BEFORE_WARNING:
                self._complaints.refused(self._own_key, link=self._address, why=cause)
        if now_s < self._due_at_s:
            return False
        self._due_at_s = now_s + WITHOUT_SESSION_S
        return True
