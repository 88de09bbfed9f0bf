"""Worker threads for requests. Owns what becomes of work whose client has gone.

Such work is not started, and stops where it calls `Ticket.check`.
"""

import asyncio
import dataclasses
import queue
from collections.abc import Callable
from typing import TypeVar

from services.gateway.http.errors import ApiError
from shared.tenants.tenant_threads import TenantThreads

T = TypeVar("T")

QUEUE_RETRY_S = 2.0
"""Retry-After of a tenant whose queue is full: its first pieces of work end within seconds."""


class WorkStopped(Exception):  # no error: the client has gone
    """The result of this work is not wanted any more."""


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """Right of one request to let its work run, one piece after another."""

    tenant: str
    """Whose turn the work takes."""
    is_cancelled: bool = False
    """No result is wanted any more."""
    was_waiting: bool = False
    """A piece of work was cancelled before a thread had taken it."""

    def check(self) -> None:
        """End this work if its result is not wanted any more. Call it between long steps.

        Raises:
            WorkStopped: when the client has gone or its request was refused.
        """
        if self.is_cancelled:
            raise WorkStopped


class RequestThreads(TenantThreads):
    """Threads that tenants share, for the event loop."""

    async def run(self, ticket: Ticket, work: Callable[[], T]) -> T:
        """Run work in one of the threads when it is its tenant's turn; return its result.

        When the caller is cancelled, work that waits is dropped, and work that runs may stop.

        Args:
            ticket: of the request.
            work: must be thread-safe; it may call `ticket.check`.

        Raises:
            ApiError: 429 when too much work of this tenant, or of all, is waiting.
        """
        try:
            future = self.submit(ticket.tenant, work)
        except queue.Full:
            raise ApiError(
                429,
                "Too many of your requests are waiting to be read and encoded.",
                code="queue_full",
                retry_after_s=QUEUE_RETRY_S,
            ) from None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            ticket.is_cancelled = True
            ticket.was_waiting = future.cancel()
            raise
        finally:
            del future  # or an error's frame refers to the error: a cycle that keeps the body
