"""Threads that tenants share. Owns whose work runs next; knows nothing of the work itself."""

import queue
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from shared.tenants.fair_share import FairShare
from shared.tenants.tenant_queues import TenantQueues

_T = TypeVar("_T")


class _Job(Future[_T]):
    """Work that waits or runs, and later its result."""

    def __init__(self, tenant: str, work: Callable[[], _T]) -> None:
        super().__init__()
        self.tenant = tenant
        self.work = work


class TenantThreads:
    """A number of threads for which the work of each tenant waits in a queue of its own.

    Tenants take turns, and the last free thread is kept for a tenant that has none. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        count: int,
        waiting: FairShare | None = None,
        begin_thread: Callable[[], object] | None = None,
    ) -> None:
        """Start the threads.

        Args:
            name: beginning of the threads' names.
            count: number of threads. With several, one tenant gets at most all but one.
            waiting: bounds the pieces of work that wait, for these threads only; None: no bound.
            begin_thread: called first in each thread.
        """
        self._pool = ThreadPoolExecutor(count, name, begin_thread)
        # All threads start now, so that their number does not grow later.
        started = threading.Barrier(count)
        for _ in range(count):
            self._pool.submit(started.wait)
        self._count = count
        self._waiting = FairShare(sys.maxsize, 1.0) if waiting is None else waiting
        self._queues: TenantQueues[_Job[Any]] = TenantQueues()
        self._running: Counter[str] = Counter()
        """Threads that each tenant occupies."""
        self._begun: deque[_Job[Any]] = deque()
        """Jobs for which a thread is free."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many pieces of work wait."""
        return self._waiting.used

    def submit(self, tenant: str, work: Callable[[], _T], *, is_first: bool = False) -> Future[_T]:
        """Run work in one of the threads when it is its tenant's turn.

        Args:
            tenant: whose work it is.
            work: must be thread-safe.
            is_first: it goes before other work of the tenant.

        Returns:
            The future result. Work that still waits when it is cancelled does not run.

        Raises:
            queue.Full: too much work of this tenant, or of all, is waiting.
        """
        job = _Job(tenant, work)
        with self._lock:
            if not self._waiting.take(tenant, 1):
                raise queue.Full
            self._queues.add(tenant, job, is_first=is_first)
            self._start_next()
        job.add_done_callback(self._drop)
        return job

    def shutdown(self) -> None:
        """Drop all waiting work and end the threads once their work is done."""
        with self._lock:
            self._queues = TenantQueues()
        self._pool.shutdown(wait=False)

    def _start_next(self) -> None:
        tenant_threads_max = max(1, self._count - 1)
        while self._running.total() < self._count:
            job = self._queues.take(lambda job: self._running[job.tenant] < tenant_threads_max)
            if job is None:
                return
            self._waiting.release(job.tenant, 1)
            if job.set_running_or_notify_cancel():
                self._running[job.tenant] += 1
                self._begun.append(job)
                self._pool.submit(self._run)

    def _run(self) -> None:
        job = self._begun.popleft()
        tenant = job.tenant
        try:
            job.set_result(job.work())
        except BaseException as error:  # noqa: BLE001 - a panic inside a library is no Exception
            job.set_exception(error)
        finally:
            # An error refers to this frame and its callers, and the job to the error: such a cycle
            # would keep the bodies of refused requests until the next garbage collection.
            del job
            with self._lock:
                self._running -= Counter((tenant,))
                self._start_next()

    def _drop(self, job: Future[Any]) -> None:
        """Remove a job that was cancelled while it waited."""
        assert isinstance(job, _Job)
        if job.cancelled():
            with self._lock:
                if self._queues.drop(job.tenant, job):
                    self._waiting.release(job.tenant, 1)
