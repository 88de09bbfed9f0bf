"""Patches that replace ZeroMQ's sockets by the simulated network and all clocks by the heap's."""

import contextlib
import itertools
import logging
from collections.abc import Iterator
from unittest import mock

from services.scheduler import main as scheduler_shell
from shared.identifiers import Incarnation
from shared.transport import links, socket_file, sockets
from tests.simulation.environment.event_heap import EventHeap
from tests.simulation.environment.network import Network


class _NoPoller:
    """Stands for a socket poller: the heap wakes processes."""

    def __init__(self, links: object) -> None:
        """Ignore the sockets."""


class _NoSocketFile:
    """Stands for the file of a listener's socket: simulated sockets have none."""

    def __init__(self, address: str, bind: object) -> None:
        """Ignore the address."""

    def restore(self, now_s: float) -> None:
        """Do nothing."""


@contextlib.contextmanager
def patched_environment(heap: EventHeap, network: Network) -> Iterator[None]:
    """Open links on the network and take time from the heap within this context."""
    numbers = itertools.count(1)

    def next_incarnation() -> Incarnation:
        return Incarnation(next(numbers))

    def clock() -> EventHeap:
        return heap

    logger = logging.getLogger("lockstep")
    was_disabled = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (sockets, "listen", network.listen),
            (sockets, "dial", network.dial),
            (sockets, "SocketPoller", _NoPoller),
            (socket_file, "SocketFile", _NoSocketFile),
            (links, "SystemClock", clock),
            (scheduler_shell, "SystemClock", clock),
            (links, "new_incarnation", next_incarnation),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        try:
            yield
        finally:
            logger.setLevel(was_disabled)
