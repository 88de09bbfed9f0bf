"""Threads that tenants share. Owns whose work runs next; knows nothing of the work itself."""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Work = Callable[[], object]


class TenantThreads:
    """A number of threads for which the work of each tenant waits in a queue of its own.

    Tenants take turns, and the last free thread is kept for a tenant that has none. Thread-safe.
    """

    def __init__(self, name: str, count: int, begin_thread: Callable[[], object]) -> None:
        """Create the threads.

        Args:
            name: beginning of the threads' names.
            count: number of threads. With several, one tenant gets at most all but one.
            begin_thread: called first in each thread.
        """
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=begin_thread)
        self._count = count
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[Work]] = OrderedDict()
        """Waiting work by tenant; the first tenant has the next turn."""
        self._running: Counter[str] = Counter()
        """Threads that each tenant occupies."""

    def __len__(self) -> int:
        """Return how many pieces of work wait."""
        with self._lock:
            return sum(map(len, self._queues.values()))

    def submit(self, tenant: str, work: Work, *, is_first: bool = False) -> None:
        """Run work when it is its tenant's turn.

        Args:
            tenant: whose work it is.
            work: raises nothing.
            is_first: it goes before other work of the tenant.
        """
        with self._lock:
            queue = self._queues.setdefault(tenant, deque())
            if is_first:
                queue.appendleft(work)
            else:
                queue.append(work)
            self._start_next()

    def drop(self, tenant: str, work: Work) -> None:
        """Do not run work of a tenant, if it still waits."""
        with self._lock:
            queue = self._queues.get(tenant, deque())
            if work in queue:
                queue.remove(work)
            if not queue:
                self._queues.pop(tenant, None)

    def _start_next(self) -> None:
        tenant_threads_max = max(1, self._count - 1)
        while self._running.total() < self._count:
            tenant = next(
                (name for name in self._queues if self._running[name] < tenant_threads_max), None
            )
            if tenant is None:
                return
            self._queues.move_to_end(tenant)
            work = self._queues[tenant].popleft()
            if not self._queues[tenant]:
                del self._queues[tenant]
            self._running[tenant] += 1
            self._pool.submit(self._run, tenant, work)

    def _run(self, tenant: str, work: Work) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                self._start_next()
