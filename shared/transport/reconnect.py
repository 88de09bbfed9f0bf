"""Policy for reconnecting a dialer, because ZeroMQ gives up after a refused handshake. Pure."""

from shared import limits
from shared.clock import Clock
from shared.transport.authentication import RefusalLog

AFTER_REFUSAL_S = 1.0
"""Seconds from a refused handshake to the next attempt. The key may have been allowed meanwhile."""

WITHOUT_SESSION_S = limits.PEER_SILENCE_S
"""Seconds after which a connection without a session is replaced, under a new identity: a listener
ignores a connection whose identity is still held by another one that broke silently."""

HANG_UPS_BEFORE_WARNING = 3
"""Hang-ups before a warning. A restarting listener causes one or two; one with another key always
hangs up."""


class ReconnectPolicy:
    """Decides when one dialer reconnects, and logs its failed handshakes."""

    def __init__(self, address: str, own_key: str, clock: Clock) -> None:
        """Start without a session.

        Args:
            address: the listener's address, for the log.
            own_key: this host's public key, or "none", for the log.
            clock: source of time.
        """
        self.failures = 0
        """Number of failed handshakes since the start."""
        self.cause = ""
        """Cause of the latest failed handshake; "" before the first."""
        self._address = address
        self._own_key = own_key
        self._clock = clock
        self._refusal_log = RefusalLog(clock)
        self._due_at_s = 0.0
        self._hang_ups = 0
        self.session_lost()

    def session_lost(self, *, is_silent: bool = False) -> None:
        """Record that the session has ended.

        Args:
            is_silent: the peer was silent, so reconnect at once. False: after WITHOUT_SESSION_S, or
                AFTER_REFUSAL_S after a refused handshake.
        """
        self._due_at_s = self._clock.now() + (0.0 if is_silent else WITHOUT_SESSION_S)
        self._hang_ups = 0

    def is_due(self, failures: list[tuple[str, bool]]) -> bool:
        """Tell whether to reconnect now, and log failed handshakes. Call it only without a session.

        After True, the next attempt is due in WITHOUT_SESSION_S, or AFTER_REFUSAL_S after a
        handshake on which ZeroMQ gives up.

        Args:
            failures: failed handshakes since the last call: the cause, and whether ZeroMQ gave up.
                If not, ZeroMQ itself tries again.
        """
        now_s = self._clock.now()
        for cause, gave_up in failures:
            self.failures += 1
            self.cause = cause
            self._hang_ups += not gave_up
            if gave_up:
                self._due_at_s = min(self._due_at_s, now_s + AFTER_REFUSAL_S)
            if gave_up or self._hang_ups >= HANG_UPS_BEFORE_WARNING:
                self._refusal_log.log_refusal(self._own_key, link=self._address, why=cause)
        if now_s < self._due_at_s:
            return False
        self._due_at_s = now_s + WITHOUT_SESSION_S
        return True
