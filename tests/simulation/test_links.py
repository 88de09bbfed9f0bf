"""What the simulation has found in the links; and that the wire is like the real thing."""

from pathlib import Path
from typing import Any

import pytest

from shared.clock import SystemClock
from shared.errors import PeerUnknown
from shared.messages import QueryStatus, ToGateway, ToScheduler
from shared.transport.links import Connected, Dialer, LinkEvent, Listener, Lost, Received
from tests.simulation.environment.event_heap import Heap
from tests.simulation.environment.network import Wire
from tests.simulation.environment.patching import bound
from tests.simulation.processes.process import Process


class _Idle(Process):
    """A process that the test moves."""

    def turn(self) -> None:
        """Do nothing by itself."""

    def due_in_s(self) -> float:
        """Never."""
        return 1e9


class _Ends:
    """A listener and a dialler on a wire."""

    def __init__(self, heap: Heap, wire: Wire) -> None:
        self.heap = heap
        with _Idle("listener", heap, wire).opens():
            self.listener: Listener[Any] = Listener("ipc:///simulated", ToScheduler, heap)
        with _Idle("dialer", heap, wire).opens():
            self.dialer: Dialer[Any] = Dialer("ipc:///simulated", "gateway", ToGateway, heap)

    def pass_time(self, seconds: float, *, listens: bool = True) -> list[LinkEvent[Any]]:
        """Let both poll for a while; return what the listener heard."""
        heard: list[LinkEvent[Any]] = []
        until_s = self.heap.now_s + seconds
        while self.heap.now_s < until_s:
            self.heap.after(0.02, lambda: None)
            at_s = self.heap.now_s + 0.02
            while self.heap.now_s < at_s:
                self.heap.step()
            self.dialer.poll(0.0)
            if listens:
                heard += self.listener.poll(0.0)
        return heard


def test_what_is_said_to_the_events_of_a_session_stays_in_it() -> None:
    """A listener that stood still hears the end of a session: its owner must not speak in the next.

    Seed 1452 of its time: a scheduler that was held up for 12 s aborted, in a gateway's new
    session, all that the gateway had owned in the old one.
    """
    heap = Heap(1)
    wire = Wire(heap, 0.001)
    wire.is_local = True
    with bound(heap, wire):
        ends = _Ends(heap, wire)
        assert [type(event) for event in ends.pass_time(1.0)] == [Connected]
        peer = ends.listener.peers[0]
        ends.dialer.send(QueryStatus())
        ends.pass_time(12.0, listens=False)

        events = ends.listener.poll(0.0)
        assert [type(event) for event in events] == [Received, Lost]
        with pytest.raises(PeerUnknown):
            ends.listener.send(peer, QueryStatus())

        assert [type(event) for event in ends.pass_time(1.0)] == [Connected]
        assert ends.dialer.is_connected


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link"


def _poll_until_lost(link: Listener[Any], limit_s: float) -> str:
    """Return the cause of the first loss; "" if nothing is lost within `limit_s`."""
    clock = SystemClock()
    began_s = clock.now()
    while clock.now() - began_s < limit_s:
        for event in link.poll(0.02):
            if isinstance(event, Lost):
                return event.cause
    return ""


def test_a_peer_whose_process_dies_is_lost_before_it_counts_as_silent(address: str) -> None:
    """A killed process says no goodbye, but its connection closes: real sockets, as the wire's."""
    listener: Listener[Any] = Listener(address, ToScheduler)
    dialer: Dialer[Any] = Dialer(address, "gateway", ToGateway)
    try:
        while not listener.peers:
            dialer.poll(0.02)
            listener.poll(0.02)
        dialer.socket.close()
        cause = _poll_until_lost(listener, 9.0)
    finally:
        listener.close(0.0)

    assert cause == "gone"


def test_a_peer_that_stands_still_is_not_gone(address: str) -> None:
    """Who does not read, write or poll, but lives, has a connection: only silence ends that."""
    listener: Listener[Any] = Listener(address, ToScheduler)
    dialer: Dialer[Any] = Dialer(address, "gateway", ToGateway)
    try:
        while not listener.peers:
            dialer.poll(0.02)
            listener.poll(0.02)
        assert _poll_until_lost(listener, 3.0) == ""
        assert listener.peers
    finally:
        dialer.close(0.0)
        listener.close(0.0)
