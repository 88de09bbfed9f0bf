"""Threads that tenants share: what their users in the gateway do not try."""

import threading
from collections.abc import Callable

from shared.tenants.tenant_threads import TenantThreads

_WAIT_S = 5.0


def test_work_that_is_first_runs_before_earlier_work_and_cancelled_work_never() -> None:
    """Only work that still waits can be cancelled. What begins a thread comes before all work."""
    order: list[str] = []
    threads = TenantThreads("test", 1, begin_thread=lambda: order.append("begun"))
    release = threading.Event()

    def note(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    running = threads.submit("tenant", lambda: release.wait(_WAIT_S))
    last = threads.submit("tenant", note("last"))
    dropped = threads.submit("tenant", note("dropped"))
    first = threads.submit("tenant", note("first"), is_first=True)
    assert dropped.cancel()
    assert not running.cancel()
    assert len(threads) == 2
    release.set()
    first.result(_WAIT_S)
    last.result(_WAIT_S)
    threads.shutdown()
    assert order == ["begun", "first", "last"]
    assert len(threads) == 0


def test_error_of_work_is_its_result_and_the_thread_goes_on() -> None:
    """Also one that is no Exception, as a panic inside a library raises."""
    threads = TenantThreads("test", 1)

    def panic() -> None:
        raise SystemExit("panic")

    assert isinstance(threads.submit("tenant", panic).exception(_WAIT_S), SystemExit)
    assert threads.submit("tenant", lambda: 7).result(_WAIT_S) == 7
    threads.shutdown()
