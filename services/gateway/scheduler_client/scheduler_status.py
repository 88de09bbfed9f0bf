"""What the scheduler last said about itself, and whether this gateway would take a request now."""

import asyncio

import msgspec

from shared.clock import Clock
from shared.messages import StatusReported

FRESH_S = 3.0
"""A status older than this is no news: the scheduler reports once a second."""

FINGERPRINT_CHARS = 12
"""Leading characters of the model's fingerprint that clients see."""


class StatusBoard:
    """The last StatusReported and this process's own state."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: StatusReported | None = None
        self._at_s = 0.0
        self._news: asyncio.Future[bool] | None = None
        """What `wait_fresh` waits for: True with the next report, False when waiting is over."""
        self.was_ready = False
        """The world has been ready since this process began."""
        self.is_draining = False
        """This gateway ends: it finishes what runs and takes nothing new."""

    @property
    def last(self) -> StatusReported | None:
        """The last report, however old."""
        return self._last

    @property
    def context_tokens_max(self) -> int:
        """Longest prompt plus completion; 0 when not known."""
        return self._last.context_tokens_max if self._last else 0

    @property
    def fingerprint(self) -> str | None:
        """What clients get as `system_fingerprint`."""
        known = self._last.model_fingerprint if self._last else ""
        return known[:FINGERPRINT_CHARS] or None

    def report(self, status: StatusReported, now_s: float) -> None:
        """Take a new report."""
        self._last = status
        self._at_s = now_s
        self.was_ready = self.was_ready or status.ready
        self._wake(True)

    @property
    def is_fresh(self) -> bool:
        """Tell whether the scheduler has reported lately."""
        return self._last is not None and self._clock.now() - self._at_s < FRESH_S

    async def wait_fresh(self, timeout_s: float) -> bool:
        """Wait for a report unless there is a fresh one; False when none comes in time."""
        if self.is_fresh:
            return True
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                # All who wait share it: one that is cancelled must not end the others' wait.
                return await asyncio.shield(self._news)
        except TimeoutError:
            return False

    def end_waits(self) -> None:
        """Answer everybody in `wait_fresh` with False now: nobody will report in time."""
        self._wake(False)

    def _wake(self, has_reported: bool) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set_result(has_reported)

    def forget(self) -> None:
        """Note that the scheduler is gone; its last words stay readable, but are not fresh."""
        self._at_s = 0.0 if self._last is None else self._clock.now() - FRESH_S

    def unready_reason(self) -> str:
        """Return why no request would be served now; "" when one would."""
        if self.is_draining:
            return "the gateway is shutting down"
        if self._last is None or not self.is_fresh:
            return "the scheduler does not report"
        if self._last.draining:
            return "the scheduler is shutting down"
        if not self._last.ready:
            return self._last.reason or "the world is not ready"
        return ""

    def as_json(self) -> dict[str, object]:
        """Return everything for `lockstep status`."""
        reason = self.unready_reason()
        age_s = None if self._last is None else round(self._clock.now() - self._at_s, 3)
        return {
            "ready": not reason,
            "reason": reason,
            "age_s": age_s,
            "scheduler": msgspec.to_builtins(self._last),
        }
