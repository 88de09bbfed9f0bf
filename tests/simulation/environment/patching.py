"""Puts the wire and the clock in the place of ZeroMQ's sockets and the machine's clock."""

import contextlib
import itertools
import logging
from collections.abc import Iterator
from unittest import mock

from services.scheduler import main as scheduler_shell
from shared.identifiers import Incarnation
from shared.transport import links, sockets
from tests.simulation.environment.event_heap import Heap
from tests.simulation.environment.network import Wire


class _NoWaiter:
    """Of `LinkSet`: the heap knows who has news."""

    def __init__(self, links: object) -> None:
        """Take the sockets, for nothing."""


@contextlib.contextmanager
def bound(heap: Heap, wire: Wire) -> Iterator[None]:
    """Within it, whatever opens a link opens it on the wire, and every clock is the heap's."""
    numbers = itertools.count(1)

    def next_incarnation() -> Incarnation:
        return Incarnation(next(numbers))

    def clock() -> Heap:
        return heap

    logger = logging.getLogger("lockstep")
    was_disabled = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (sockets, "listen", wire.listen),
            (sockets, "dial", wire.dial),
            (sockets, "SocketPoller", _NoWaiter),
            (links, "SystemClock", clock),
            (scheduler_shell, "SystemClock", clock),
            (links, "new_incarnation", next_incarnation),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        try:
            yield
        finally:
            logger.setLevel(was_disabled)
