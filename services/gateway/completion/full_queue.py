"""Remembers that the scheduler's queue was full, so that most refusals cost no more than the door.

A refusal by the scheduler costs reading a body, encoding a prompt and two messages; under a flood
that is taken from the requests that run. Until one of this gateway's requests moves the queue has
not moved either, unless another gateway's did, which `MEMORY_S` allows for.
"""

from services.gateway.http import errors
from services.gateway.http.errors import ApiError
from shared.clock import Clock
from shared.messages import RequestRejected

MEMORY_S = 0.25
"""Then the scheduler is asked again: requests of other gateways leave the queue unseen."""


class FullQueue:
    """What the scheduler said last about its queue."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refusal: RequestRejected | None = None
        self._until_s = 0.0

    def note_full(self, refusal: RequestRejected) -> None:
        """Take a refusal with cause `queue_full`."""
        self._refusal = refusal
        self._until_s = self._clock.now() + MEMORY_S

    def note_moved(self) -> None:
        """Note that a request was admitted or has ended: there may be a place."""
        self._refusal = None

    def refusal(self) -> ApiError | None:
        """Return what a new request would be told; None when the scheduler must be asked."""
        if self._refusal is None or self._clock.now() >= self._until_s:
            return None
        return errors.rejected(self._refusal, "")
