"""Worker threads that tenants share: turns, a free thread for others, and cancelled work."""

import asyncio
import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from services.gateway.endpoints.request_threads import RequestThreads, Ticket, WorkStopped
from services.gateway.http.errors import ApiError
from shared.tenants.fair_share import FairShare

_WAIT_S = 5.0


def _threads(count: int, waiting: int = 100, share: float = 1.0) -> RequestThreads:
    return RequestThreads("test", count, FairShare(waiting, share))


async def _submit(
    threads: RequestThreads, ticket: Ticket, work: Callable[[], object]
) -> "asyncio.Task[object]":
    """Queue work, and let it start if a thread is free."""
    task = asyncio.create_task(threads.run(ticket, work))
    await asyncio.sleep(0)
    return task


def test_tenants_take_turns_when_one_has_queued_more_work() -> None:
    """The work of a second tenant runs after one piece of the first, not after all of them."""

    async def scenario() -> list[str]:
        threads = _threads(1)
        release = threading.Event()
        order: list[str] = []
        tasks = [await _submit(threads, Ticket("first"), lambda: release.wait(_WAIT_S))]
        for tenant, count in (("first", 5), ("second", 2)):
            for _ in range(count):
                work = lambda tenant=tenant: order.append(tenant)  # noqa: E731
                tasks.append(await _submit(threads, Ticket(tenant), work))
        release.set()
        await asyncio.gather(*tasks)
        threads.shutdown()
        return order

    assert asyncio.run(scenario())[:4] == ["first", "second", "first", "second"]


def test_one_tenant_leaves_a_thread_free_for_another() -> None:
    """However much one tenant has to do, the work of another begins at once."""

    async def scenario() -> str:
        threads = _threads(3)
        release = threading.Event()
        tasks = [
            await _submit(threads, Ticket("first"), lambda: release.wait(_WAIT_S))
            for _ in range(10)
        ]
        async with asyncio.timeout(_WAIT_S / 2):
            result = await threads.run(Ticket("second"), lambda: "done")
        assert not any(task.done() for task in tasks)
        release.set()
        await asyncio.gather(*tasks)
        threads.shutdown()
        return result

    assert asyncio.run(scenario()) == "done"


def test_tenant_with_full_queue_gets_429_and_another_does_not() -> None:
    """Waiting work is bounded by tenant: half of ten places, then a 429 that says to retry."""

    async def scenario() -> None:
        threads = _threads(1, waiting=10, share=0.5)
        release = threading.Event()
        tasks = [
            await _submit(threads, Ticket("first"), lambda: release.wait(_WAIT_S)) for _ in range(6)
        ]
        with pytest.raises(ApiError) as caught:
            await threads.run(Ticket("first"), lambda: None)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        tasks.append(await _submit(threads, Ticket("second"), lambda: None))
        release.set()
        await asyncio.gather(*tasks)
        await threads.run(Ticket("first"), lambda: None)
        threads.shutdown()

    asyncio.run(scenario())


def test_waiting_work_of_client_that_has_gone_never_starts() -> None:
    """Work that waits is dropped with its client, and leaves its place in the queue."""

    async def scenario() -> list[str]:
        threads = _threads(1, waiting=1)
        release = threading.Event()
        ran: list[str] = []
        first = await _submit(threads, Ticket("first"), lambda: release.wait(_WAIT_S))
        gone = await _submit(threads, Ticket("first"), lambda: ran.append("gone"))
        gone.cancel()
        await asyncio.wait({gone})
        stays = await _submit(threads, Ticket("first"), lambda: ran.append("stays"))
        release.set()
        await asyncio.gather(first, stays)
        threads.shutdown()
        return ran

    assert asyncio.run(scenario()) == ["stays"]


def test_running_work_of_client_that_has_gone_stops_at_its_next_check() -> None:
    """Between two steps the work learns that its client has gone, and frees its thread."""

    async def scenario() -> list[str]:
        threads = _threads(1)
        started, release = threading.Event(), threading.Event()
        steps: list[str] = []
        ticket = Ticket("first")

        def work() -> None:
            steps.append("first step")
            started.set()
            release.wait(_WAIT_S)
            try:
                ticket.check()
            except WorkStopped:
                steps.append("stopped")
                raise
            steps.append("second step")

        task = await _submit(threads, ticket, work)
        await asyncio.to_thread(started.wait, _WAIT_S)
        task.cancel()
        await asyncio.wait({task})
        release.set()
        await threads.run(Ticket("second"), lambda: None)
        threads.shutdown()
        return steps

    assert asyncio.run(scenario()) == ["first step", "stopped"]


def test_error_of_work_reaches_the_caller() -> None:
    """A refusal that the work raises ends the request that waits for it."""

    async def scenario() -> None:
        threads = _threads(1)

        def refuse() -> None:
            raise ApiError(400, "No.")

        with pytest.raises(ApiError, match="No"):
            await threads.run(Ticket("first"), refuse)
        assert await threads.run(Ticket("first"), lambda: 7) == 7
        threads.shutdown()

    asyncio.run(scenario())


def test_failed_work_leaves_nothing_in_memory_without_garbage_collection() -> None:
    """The body of a refused request is freed with its error, although collections are rare."""

    class Body:
        pass

    async def scenario() -> weakref.ref[Body]:
        threads = _threads(1)
        body = Body()
        kept = weakref.ref(body)

        def refuse(one: Body) -> None:
            raise ApiError(400, f"No {type(one).__name__}.")

        with contextlib.suppress(ApiError):
            await threads.run(Ticket("first"), functools.partial(refuse, body))
        del body
        # The thread forgets its last work when it takes the next.
        await threads.run(Ticket("first"), lambda: None)
        threads.shutdown()
        return kept

    gc.disable()
    try:
        assert asyncio.run(scenario())() is None
    finally:
        gc.enable()
