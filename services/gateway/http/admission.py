"""Who is let in: bounds on requests and on bodies inside, before anything is read or computed."""

import asyncio

from aiohttp import web

from services.gateway.http import errors
from services.gateway.http.errors import ApiError
from services.gateway.scheduler_client.scheduler_status import StatusBoard

BODIES_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of bodies at once, from the first byte until the prompt is token ids. What is made of a
body takes several times its size; 500 bodies of 100,000 tokens fit."""
FULL_RETRY_S = 2.0
"""A gateway that is full has had so many requests that some end within seconds."""
BODIES_RETRY_S = 1.0
"""Bodies are read and encoded in less than a second each."""
DRAINING_RETRY_S = 10.0
"""A gateway that ends is started again, or another one takes over."""

_TURNS = 7
"""Turns of the event loop from a connection that waits to a request that is read: 7 were counted
where it is new, 4 where it was kept."""


class AdmittedRequest:
    """One HTTP request that was let in."""

    __slots__ = ("_door", "_held_bytes", "_is_encoding", "is_read")

    def __init__(self, door: "AdmissionControl") -> None:
        self._door = door
        self._held_bytes = 0
        self._is_encoding = False
        self.is_read = False
        """All of it is here: from now on a drain waits for its answer."""

    def hold(self, body_bytes: int) -> None:
        """Note that its body has, or will have, so many bytes.

        Raises:
            ApiError: 429; all bodies together are too large.
        """
        self._door.hold(body_bytes - self._held_bytes)
        self._held_bytes = body_bytes

    def note_read(self) -> None:
        """Note that the whole request is here."""
        self.is_read = self._is_encoding = True
        self._door.unanswered += 1
        self._door.encoding += 1

    def release(self) -> None:
        """Note that its body is not needed any more. May be called again."""
        self._door.hold(-self._held_bytes)
        self._held_bytes = 0
        self._door.encoding -= self._is_encoding
        self._is_encoding = False


VISIT = web.RequestKey("visit", AdmittedRequest)


class AdmissionControl:
    """Counts who is inside."""

    def __init__(self, requests_max: int, status: StatusBoard) -> None:
        self._requests_max = requests_max
        self._status = status
        self._inside = 0
        self._body_bytes = 0
        self.unanswered = 0
        """Requests that were read as a whole and whose answers are not written as a whole."""
        self.encoding = 0
        """Requests that were read as a whole and are not yet token ids."""

    def enter(self, request: web.Request) -> AdmittedRequest:
        """Let a request in, before its body is read; whoever calls this must call `leave`.

        Raises:
            ApiError: 503 or 429.
        """
        self.check(1, self._inside)
        visit = AdmittedRequest(self)
        request[VISIT] = visit
        self._inside += 1
        return visit

    def let_go(self, request: web.Request) -> None:
        """Note that a request has its answer, though it may not have been written as a whole."""
        visit = request.get(VISIT)
        if visit is not None:
            visit.release()

    def leave(self, request: web.Request) -> None:
        """Note that a request has been answered; one that was not let in does not count."""
        visit = request.get(VISIT)
        if visit is not None:
            visit.release()
            self._inside -= 1
            self.unanswered -= visit.is_read

    def check(self, count: int, held: int) -> None:
        """Refuse `count` more than the `held` there are when that is too many, or at the end.

        Raises:
            ApiError: 503 or 429.
        """
        if self._status.is_draining:
            error = errors.unavailable("The server is shutting down.", DRAINING_RETRY_S)
            error.close = True
            raise error
        if held + count > self._requests_max:
            raise _full("Too many requests are open.", FULL_RETRY_S)

    async def others_follow(self) -> bool:
        """Tell whether others are about to be token ids, those that are just arriving included."""
        for _ in range(_TURNS):
            if self.encoding:
                return True
            await asyncio.sleep(0)
        return self.encoding > 0

    def hold(self, more_bytes: int) -> None:
        """Count bytes of bodies.

        Raises:
            ApiError: 429; it would be too many.
        """
        if more_bytes > 0 and self._body_bytes + more_bytes > BODIES_BYTES_MAX:
            raise _full("Too many bodies are being read.", BODIES_RETRY_S)
        self._body_bytes += more_bytes


def _full(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, code="queue_full", retry_after_s=retry_after_s)
