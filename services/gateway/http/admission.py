"""Admission of HTTP requests. Owns the bounds on open requests and body bytes; parses nothing."""

import asyncio

from aiohttp import web

from services.gateway.http import errors
from services.gateway.http.errors import ApiError
from services.gateway.scheduler_client.scheduler_status import StatusBoard
from shared.clock import Clock
from shared.messages import RequestRejected

BODIES_BYTES_MAX = 256 * 1024 * 1024
"""Total bytes of all bodies, from the first byte until the prompt is token ids. Parsing a body
takes several times its size. 500 bodies of 100,000 tokens fit."""
REQUESTS_RETRY_S = 2.0
"""Retry-After of a full gateway: with its number of requests some end within seconds."""
BODIES_RETRY_S = 1.0
"""Retry-After when bodies take too much memory: each is read and encoded within a second."""
DRAINING_RETRY_S = 10.0
"""Retry-After of a draining gateway: it is restarted, or another one takes over."""
FULL_MEMORY_S = 0.25
"""Time for which a full scheduler queue is remembered; requests of other gateways may leave it."""

_TURNS_MAX = 7
"""Turns of the event loop from a waiting connection to a request that is read. Measured: 7 for a
new connection, 4 for a kept one."""


class AdmittedRequest:
    """One admitted HTTP request, and the memory reserved for its body in bytes.

    The memory is reserved while the body arrives and until the prompt has been encoded to token
    ids.
    """

    __slots__ = ("_admission", "_is_encoding", "_reserved_bytes", "is_read")

    def __init__(self, admission: "AdmissionControl") -> None:
        self._admission = admission
        self._reserved_bytes = 0
        self._is_encoding = False
        self.is_read = False
        """The whole request was read, so a drain waits for its response."""

    def reserve_body(self, body_bytes: int) -> None:
        """Reserve memory for the request's body; each call replaces the number of the call before.

        Args:
            body_bytes: length of the whole body, as announced or as received so far.

        Raises:
            ApiError: 429 when the bodies of all open requests would exceed `BODIES_BYTES_MAX`.
        """
        self._admission.reserve_bytes(body_bytes - self._reserved_bytes)
        self._reserved_bytes = body_bytes

    def mark_read(self) -> None:
        """Record that the whole request was read and its prompt is not encoded to token ids yet."""
        self.is_read = self._is_encoding = True
        self._admission.unanswered += 1
        self._admission.encoding += 1

    def release_body(self) -> None:
        """Release the memory reserved for the request's body. Idempotent.

        Call it when the prompt has become token ids or the request has failed: the request then no
        longer counts as one whose prompt is being encoded.
        """
        self._admission.reserve_bytes(-self._reserved_bytes)
        self._reserved_bytes = 0
        self._admission.encoding -= self._is_encoding
        self._is_encoding = False


ADMITTED = web.RequestKey("admitted", AdmittedRequest)


class AdmissionControl:
    """Limits on the HTTP requests that are open at once and on the memory for their bodies.

    A request is open from `admit`, before its body is read, until `remove`, after its response.
    """

    def __init__(self, requests_max: int, status: StatusBoard) -> None:
        """Begin without requests.

        Args:
            requests_max: most requests that may be open, and most completions.
            status: says whether this gateway is draining.
        """
        self._requests_max = requests_max
        self._status = status
        self._admitted = 0
        self._body_bytes = 0
        self.unanswered = 0
        """Requests that were read completely and whose responses are not written completely."""
        self.encoding = 0
        """Requests that were read completely and whose prompts are not token ids yet."""

    def admit(self, request: web.Request) -> AdmittedRequest:
        """Count a request as open before its body is read, or refuse it.

        The caller must call `remove` when the request has been answered or has failed.

        Returns:
            The record with which the request's body reserves memory; it is also stored in
            `request`.

        Raises:
            ApiError: 503 while the gateway shuts down; 429 when too many requests are open.
        """
        self.check_capacity(1, self._admitted)
        admitted = AdmittedRequest(self)
        request[ADMITTED] = admitted
        self._admitted += 1
        return admitted

    def release_body(self, request: web.Request) -> None:
        """Release the memory reserved for a request's body. Does nothing if it was not admitted."""
        admitted = request.get(ADMITTED)
        if admitted is not None:
            admitted.release_body()

    def remove(self, request: web.Request) -> None:
        """Stop counting an answered or failed request as open, and release the memory of its body.

        Does nothing if the request was not admitted.
        """
        admitted = request.get(ADMITTED)
        if admitted is not None:
            admitted.release_body()
            self._admitted -= 1
            self.unanswered -= admitted.is_read

    def check_capacity(self, count: int, open_count: int) -> None:
        """Refuse more requests if they and the open ones exceed the limit `requests_max`.

        Args:
            count: number of new HTTP requests, or of new completions.
            open_count: number of open ones of the same kind.

        Raises:
            ApiError: 503 while the gateway shuts down; 429 when the sum exceeds the limit.
        """
        if self._status.is_draining:
            error = errors.unavailable("The server is shutting down.", DRAINING_RETRY_S)
            error.close = True
            raise error
        if open_count + count > self._requests_max:
            raise _full("Too many requests are open.", REQUESTS_RETRY_S)

    async def more_requests_expected(self) -> bool:
        """Return whether another request will soon be sent to the scheduler.

        That is so while another request has been read completely and its prompt is being encoded.
        Before returning False, waits up to seven turns of the event loop, in which requests may be
        read.
        """
        for _ in range(_TURNS_MAX):
            if self.encoding:
                return True
            await asyncio.sleep(0)
        return self.encoding > 0

    def reserve_bytes(self, more_bytes: int) -> None:
        """Add to the memory reserved for the bodies of all open requests.

        Args:
            more_bytes: bytes to add; a negative number releases bytes.

        Raises:
            ApiError: 429 when the sum would exceed `BODIES_BYTES_MAX`.
        """
        if more_bytes > 0 and self._body_bytes + more_bytes > BODIES_BYTES_MAX:
            raise _full("Too many request bodies are being read.", BODIES_RETRY_S)
        self._body_bytes += more_bytes


class FullQueue:
    """The scheduler's last `queue_full` rejection, repeated to new requests for a short time.

    A new rejection by the scheduler would cost reading a body, encoding a prompt and two messages.
    Until one of this gateway's requests leaves the queue, the next request would be rejected too.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rejection: RequestRejected | None = None
        self._until_s = 0.0

    def store(self, rejection: RequestRejected) -> None:
        """Store a rejection with cause `queue_full`, to repeat it for `FULL_MEMORY_S` seconds."""
        self._rejection = rejection
        self._until_s = self._clock.now() + FULL_MEMORY_S

    def clear(self) -> None:
        """Discard the stored rejection, because the queue may have a free place.

        Call it when a request of this gateway was admitted or has ended, or the session was lost.
        """
        self._rejection = None

    def error(self) -> ApiError | None:
        """Return the 429 that repeats the stored rejection, None without one or after its time.

        None means that the request must be sent to the scheduler, which accepts or rejects it.
        """
        if self._rejection is None or self._clock.now() >= self._until_s:
            return None
        return errors.rejected(self._rejection, "")


def _full(message: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, code="queue_full", retry_after_s=retry_after_s)
