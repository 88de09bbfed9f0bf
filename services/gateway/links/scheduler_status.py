"""The scheduler's last status. Owns the gateway's readiness; asks the scheduler nothing."""

import asyncio

import msgspec

from shared.clock import Clock
from shared.messages import StatusReported

FRESH_S = 3.0
"""Age at which a status is stale: the scheduler reports once a second."""

FINGERPRINT_CHARS = 12
"""Leading characters of the model's fingerprint that clients see."""


class StatusBoard:
    """The scheduler's last status report, and whether this gateway serves new requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.last: StatusReported | None = None
        """The scheduler's last status report, also if it is stale; None before the first."""
        self._at_s = 0.0
        self._next_report: asyncio.Future[bool] | None = None
        """Result of `wait_for_report`: True with the next report, False when waits are
        cancelled."""
        self.was_ready = False
        """The world has been ready since this process started."""
        self.is_draining = False
        """This gateway is shutting down: it finishes running requests and accepts no new ones."""

    @property
    def context_tokens_max(self) -> int:
        """Most tokens that prompt and completion may have together, 0 while it is not known."""
        return self.last.context_tokens_max if self.last else 0

    @property
    def fingerprint(self) -> str | None:
        """The first `FINGERPRINT_CHARS` characters of the model fingerprint, None while unknown."""
        known = self.last.model_fingerprint if self.last else ""
        return known[:FINGERPRINT_CHARS] or None

    def report(self, status: StatusReported, now_s: float) -> None:
        """Store a new report and wake the tasks in `wait_for_report`.

        Args:
            status: the report.
            now_s: time of its arrival by this board's clock.
        """
        self.last = status
        self._at_s = now_s
        self.was_ready = self.was_ready or status.ready
        self._wake(True)

    @property
    def is_fresh(self) -> bool:
        """Whether the last report arrived less than `FRESH_S` ago in the present session."""
        return self.last is not None and self._clock.now() - self._at_s < FRESH_S

    async def wait_for_report(self, timeout_s: float) -> bool:
        """Wait for the scheduler's next report unless the last one is fresh.

        Args:
            timeout_s: longest wait in seconds.

        Returns:
            True with a fresh report; False after the timeout or `cancel_waits`.
        """
        if self.is_fresh:
            return True
        if self._next_report is None:
            self._next_report = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                # All waiting tasks share the future, so cancelling one must not cancel it.
                return await asyncio.shield(self._next_report)
        except TimeoutError:
            return False

    def cancel_waits(self) -> None:
        """Make every pending `wait_for_report` return False now."""
        self._wake(False)

    def _wake(self, has_reported: bool) -> None:
        waiting, self._next_report = self._next_report, None
        if waiting is not None:
            waiting.set_result(has_reported)

    def mark_lost(self) -> None:
        """Record the loss of the session with the scheduler: the last report is stale now."""
        self._at_s = 0.0 if self.last is None else self._clock.now() - FRESH_S

    def unready_reason(self) -> str:
        """Return why the gateway serves no new requests now, in words; "" if it does."""
        if self.is_draining:
            return "the gateway is shutting down"
        if self.last is None or not self.is_fresh:
            return "the scheduler does not report"
        if self.last.draining:
            return "the scheduler is shutting down"
        if not self.last.ready:
            return self.last.reason or "the world is not ready"
        return ""

    def as_json(self) -> dict[str, object]:
        """Return the response body of /v1/lockstep/status as a dict.

        Its keys are `ready`, `reason` (why not), `age_s` (seconds since the last report, None
        before the first) and `scheduler` (the last report, None before the first).
        """
        reason = self.unready_reason()
        age_s = None if self.last is None else round(self._clock.now() - self._at_s, 3)
        return {
            "ready": not reason,
            "reason": reason,
            "age_s": age_s,
            "scheduler": msgspec.to_builtins(self.last),
        }
