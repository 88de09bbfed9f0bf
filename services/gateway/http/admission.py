"""Admission of HTTP requests. Owns the bounds on open requests and body bytes; parses nothing.

Each bound is shared between tenants, so that one of them cannot use up what the others need.
"""

import asyncio

from aiohttp import web

from services.gateway.http import authentication, errors
from services.gateway.http.errors import ApiError
from services.gateway.links.scheduler_status import StatusBoard
from shared.clock import Clock
from shared.messages import RequestRejected
from shared.tenants.fair_share import FairShare

BODIES_BYTES_MAX = 256 * 1024 * 1024
"""Total bytes that have arrived of all bodies whose prompts are not token ids yet. Parsing a body
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
    """One admitted HTTP request: its tenant, and its part of the gateway's limits.

    Memory is reserved while the body arrives and until the prompt has been encoded to token ids.
    """

    __slots__ = ("_admission", "_is_encoding", "choices", "is_read", "reserved_bytes", "tenant")

    def __init__(self, admission: "AdmissionControl", tenant: str) -> None:
        self._admission = admission
        self._is_encoding = False
        self.tenant = tenant
        self.reserved_bytes = 0
        """Memory that is reserved for the body."""
        self.choices = 0
        """Completions that it asks for; 0 before they are known."""
        self.is_read = False
        """The whole request was read, so a drain waits for its response."""

    def reserve_body(self, body_bytes: int) -> None:
        """Reserve memory for the request's body; each call replaces the number of the call before.

        Args:
            body_bytes: bytes of the body that have arrived so far.

        Raises:
            ApiError: 429 when the bodies of all open requests would exceed `BODIES_BYTES_MAX`, or
                those of this tenant its share of it.
        """
        self._admission.reserve_bytes(self, body_bytes)

    def mark_read(self) -> None:
        """Record that the whole request was read and its prompt is not encoded to token ids yet."""
        self.is_read = self._is_encoding = True
        self._admission.unanswered += 1
        self._admission.encoding += 1

    def release_body(self, kept_bytes: int = 0) -> None:
        """Release the memory reserved for the request's body. Idempotent.

        Call it when the prompt has become token ids or the request has failed: the request then no
        longer counts as one whose prompt is being encoded.

        Args:
            kept_bytes: memory of the body, or of objects read from it, until the answer ends.
        """
        self._admission.release_bytes(self, kept_bytes)
        self._admission.encoding -= self._is_encoding
        self._is_encoding = False


ADMITTED = web.RequestKey("admitted", AdmittedRequest)


class AdmissionControl:
    """Limits on the HTTP requests that are open at once and on the memory for their bodies.

    A request is open from `admit`, before its body is read, until `remove`, after its response.
    """

    def __init__(self, requests_max: int, share: float, status: StatusBoard) -> None:
        """Begin without requests.

        Args:
            requests_max: most requests that may be open, and most completions.
            share: largest part of each limit for one tenant (`tenants.share`).
            status: says whether this gateway is draining.
        """
        self._status = status
        self._requests = FairShare(requests_max, share)
        self._choices = FairShare(requests_max, share)
        self._bodies = FairShare(BODIES_BYTES_MAX, share)
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
            ApiError: 503 while the gateway shuts down; 429 when too many requests are open, in all
                or of the request's tenant.
        """
        self._refuse_when_draining()
        admitted = AdmittedRequest(self, authentication.tenant(request))
        if not self._requests.take(admitted.tenant, 1):
            raise _full(self._requests, 1, "open requests", REQUESTS_RETRY_S)
        request[ADMITTED] = admitted
        return admitted

    def reserve_choices(self, request: web.Request, count: int) -> None:
        """Count the completions that an admitted request asks for as open, or refuse the request.

        Raises:
            ApiError: 503 while the gateway shuts down; 429 when too many completions are open, in
                all or of the request's tenant.
        """
        self._refuse_when_draining()
        admitted = request[ADMITTED]
        if not self._choices.take(admitted.tenant, count):
            raise _full(self._choices, count, "open completions", REQUESTS_RETRY_S)
        admitted.choices += count

    def release_body(self, request: web.Request, kept_bytes: int = 0) -> None:
        """Release the memory reserved for a request's body. Does nothing if it was not admitted.

        Args:
            request: the request.
            kept_bytes: as in `AdmittedRequest.release_body`.
        """
        admitted = request.get(ADMITTED)
        if admitted is not None:
            admitted.release_body(kept_bytes)

    def remove(self, request: web.Request) -> None:
        """Stop counting an answered or failed request as open, and release the memory of its body.

        Does nothing if the request was not admitted.
        """
        admitted = request.get(ADMITTED)
        if admitted is not None:
            admitted.release_body()
            self._choices.release(admitted.tenant, admitted.choices)
            self._requests.release(admitted.tenant, 1)
            self.unanswered -= admitted.is_read

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

    def reserve_bytes(self, admitted: AdmittedRequest, body_bytes: int) -> None:
        """Set the memory that is reserved for the body of an admitted request.

        Raises:
            ApiError: 429 when the bodies of all open requests would exceed `BODIES_BYTES_MAX`, or
                those of this tenant its share of it.
        """
        more_bytes = body_bytes - admitted.reserved_bytes
        if not self._bodies.take(admitted.tenant, more_bytes):
            raise _full(self._bodies, more_bytes, "bytes in request bodies", BODIES_RETRY_S)
        admitted.reserved_bytes = body_bytes

    def release_bytes(self, admitted: AdmittedRequest, kept_bytes: int) -> None:
        """Release memory of an admitted request's body beyond `kept_bytes`. Idempotent."""
        kept_bytes = min(kept_bytes, admitted.reserved_bytes)
        self._bodies.release(admitted.tenant, admitted.reserved_bytes - kept_bytes)
        admitted.reserved_bytes = kept_bytes

    def _refuse_when_draining(self) -> None:
        if self._status.is_draining:
            error = errors.unavailable("The server is shutting down.", DRAINING_RETRY_S)
            error.close = True
            raise error


class FullQueue:
    """The scheduler's last `queue_full` rejection of each tenant, repeated for a short time.

    A new rejection by the scheduler would cost reading a body, encoding a prompt and two messages.
    Until one of this gateway's requests leaves the queue, the tenant's next request would be
    rejected too. Another tenant's may have room.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rejections: dict[str, tuple[RequestRejected, float]] = {}
        """By tenant: its last rejection, and the time until which it is repeated."""

    def store(self, tenant: str, rejection: RequestRejected) -> None:
        """Store a rejection with cause `queue_full`, to repeat it for `FULL_MEMORY_S` seconds."""
        now_s = self._clock.now()
        # The latest is at the end, so all before the first valid one are over.
        self._rejections.pop(tenant, None)
        while self._rejections and next(iter(self._rejections.values()))[1] <= now_s:
            del self._rejections[next(iter(self._rejections))]
        self._rejections[tenant] = rejection, now_s + FULL_MEMORY_S

    def clear(self) -> None:
        """Discard the stored rejections, because the queue may have a free place.

        Call it when a request of this gateway was admitted or has ended, or the session was lost.
        """
        self._rejections.clear()

    def error(self, tenant: str) -> ApiError | None:
        """Return the 429 that repeats a tenant's rejection, None without one or after its time.

        None means that the request must be sent to the scheduler, which accepts or rejects it.
        """
        rejection, until_s = self._rejections.get(tenant, (None, 0.0))
        if rejection is None or self._clock.now() >= until_s:
            return None
        return errors.rejected(rejection, "")


def _full(limit: FairShare, amount: int, what: str, retry_after_s: float) -> ApiError:
    """Return the 429 for a request that a limit has no room for.

    Args:
        limit: the limit.
        amount: what the request needs of it.
        what: plural of the limited things.
        retry_after_s: seconds after which there may be room.
    """
    if limit.used + amount > limit.total:
        message = f"The server is full: it has too many {what}."
    else:
        message = (
            f"You have too many {what}, which use up your share of this server: send this request "
            "again when some of yours have ended."
        )
    return ApiError(429, message, code="queue_full", retry_after_s=retry_after_s)
