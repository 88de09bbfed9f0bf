"""Worker threads that tenants share. Owns whose work runs next; knows nothing of the work itself.

Tenants take turns (round robin), and the last free thread is kept for a tenant that has none. Work
whose client has gone is not started, and stops where it calls `Ticket.check`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from services.gateway.http.errors import ApiError
from shared.fair_share import FairShare

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
    is_waiting: bool = False
    """A piece of work is in the queue and no thread has taken it."""
    is_cancelled: bool = False
    """No result is wanted any more."""

    def check(self) -> None:
        """End this work if its result is not wanted any more. Call it between long steps.

        Raises:
            WorkStopped: when the client has gone or its request was refused.
        """
        if self.is_cancelled:
            raise WorkStopped


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    ticket: Ticket
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class FairThreads:
    """A number of threads for which the work of each tenant waits in a bounded queue of its own.

    Used from the event loop only.
    """

    def __init__(self, name: str, count: int, waiting: FairShare) -> None:
        """Create the threads.

        Args:
            name: beginning of the threads' names.
            count: number of threads. With several, one tenant gets at most all but one.
            waiting: bounds the pieces of work that wait.
        """
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        # All threads start now, so that their number does not grow while the gateway serves.
        started = threading.Barrier(count)
        for _ in range(count):
            self._pool.submit(started.wait)
        self._count = count
        self._waiting = waiting
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Waiting work by tenant; the first tenant has the next turn."""
        self._running: Counter[str] = Counter()
        """Threads that each tenant occupies."""

    async def run(self, ticket: Ticket, work: Callable[[], T]) -> T:
        """Run work in one of the threads when it is its tenant's turn; return its result.

        When the caller is cancelled, work that waits is dropped, and work that runs may stop.

        Args:
            ticket: of the request.
            work: must be thread-safe; it may call `ticket.check`.

        Raises:
            ApiError: 429 when too much work of this tenant, or of all, is waiting.
        """
        if not self._waiting.take(ticket.tenant, 1):
            raise ApiError(
                429,
                "Too many of your requests are waiting to be read and encoded.",
                code="queue_full",
                retry_after_s=QUEUE_RETRY_S,
            )
        job = _Job(ticket, work, asyncio.get_running_loop().create_future())
        ticket.is_waiting = True
        self._queues.setdefault(ticket.tenant, deque()).append(job)
        self._start_next()
        try:
            result: T = await job.result
        except asyncio.CancelledError:
            ticket.is_cancelled = True
            if ticket.is_waiting:
                self._take_out(job)
            raise
        finally:
            # An error refers to this frame, and the job to the error: such a cycle would keep the
            # bodies of refused requests until the next garbage collection.
            del job
        return result

    def shutdown(self) -> None:
        """Drop all waiting work and end the threads once their work is done."""
        self._queues.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        tenant_threads_max = max(1, self._count - 1)
        while self._running.total() < self._count:
            tenant = next(
                (name for name in self._queues if self._running[name] < tenant_threads_max), None
            )
            if tenant is None:
                return
            self._queues.move_to_end(tenant)
            job = self._queues[tenant][0]
            self._take_out(job)
            job.ticket.is_waiting = False
            self._running[tenant] += 1
            done = self._pool.submit(job.work)
            done.add_done_callback(functools.partial(_hand_over, self._finish, job))

    def _take_out(self, job: _Job) -> None:
        tenant = job.ticket.tenant
        self._queues[tenant].remove(job)
        if not self._queues[tenant]:
            del self._queues[tenant]
        self._waiting.release(tenant, 1)

    def _finish(self, job: _Job, done: Future[Any]) -> None:
        tenant = job.ticket.tenant
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        if not job.result.done():
            if done.cancelled():
                job.result.cancel()
            elif (error := done.exception()) is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(done.result())
        self._start_next()


def _hand_over(finish: Callable[[_Job, Future[Any]], None], job: _Job, done: Future[Any]) -> None:
    # The loop may be closed: the process is ending.
    with contextlib.suppress(RuntimeError):
        job.result.get_loop().call_soon_threadsafe(finish, job, done)
