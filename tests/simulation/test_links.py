"""Link bugs that the simulation has found, and checks that the simulated network behaves like
ZeroMQ."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.clock import SystemClock
from shared.errors import PeerUnknown
from shared.messages import QueryStatus, ToGateway, ToScheduler
from shared.transport.links import Connected, Dialer, LinkEvent, Listener, Lost, Received
from tests.simulation.environment.event_heap import EventHeap
from tests.simulation.environment.network import Network
from tests.simulation.environment.patching import patched_environment
from tests.simulation.processes.process import Process
from tests.support.waiting import wait_until


class _ManualProcess(Process):
    """A process without work of its own."""

    def turn(self) -> None:
        """Do nothing."""

    def due_in_s(self) -> float:
        """Return a time that is never reached."""
        return 1e9


class _LinkPair:
    """A listener and a dialler on a simulated network."""

    def __init__(self, heap: EventHeap, network: Network) -> None:
        self.heap = heap
        with _ManualProcess("listener", heap, network).owning_sockets():
            self.listener: Listener[Any] = Listener("ipc:///simulated", ToScheduler, heap)
        with _ManualProcess("dialer", heap, network).owning_sockets():
            self.dialer: Dialer[Any] = Dialer("ipc:///simulated", "gateway", ToGateway, heap)

    def advance(self, seconds: float, *, polls_listener: bool = True) -> list[LinkEvent[Any]]:
        """Poll both ends for `seconds`; return the listener's events."""
        heard: list[LinkEvent[Any]] = []
        until_s = self.heap.now_s + seconds
        while self.heap.now_s < until_s:
            self.heap.call_after(0.02, lambda: None)
            at_s = self.heap.now_s + 0.02
            while self.heap.now_s < at_s:
                self.heap.step()
            self.dialer.poll(0.0)
            if polls_listener:
                heard += self.listener.poll(0.0)
        return heard


def test_sending_to_lost_peer_after_listener_was_blocked_raises_peer_unknown() -> None:
    """A listener that was blocked learns of a session's end before it can send into the next
    session.

    Without this, a scheduler that was blocked for 12 s aborted a gateway's requests in its new
    session.
    """
    heap = EventHeap(1)
    network = Network(heap, 0.001)
    network.is_local = True
    with patched_environment(heap, network):
        ends = _LinkPair(heap, network)
        assert [type(event) for event in ends.advance(1.0)] == [Connected]
        peer = ends.listener.peers[0]
        ends.dialer.send(QueryStatus())
        ends.advance(12.0, polls_listener=False)

        events = ends.listener.poll(0.0)
        assert [type(event) for event in events] == [Received, Lost]
        with pytest.raises(PeerUnknown):
            ends.listener.send(peer, QueryStatus())

        assert [type(event) for event in ends.advance(1.0)] == [Connected]
        assert ends.dialer.is_connected


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Return an ipc address in a temporary folder."""
    return f"ipc://{tmp_path}/link"


@pytest.fixture
def connected_ends(address: str) -> Iterator[tuple[Listener[Any], Dialer[Any]]]:
    """Yield a listener and a connected dialler on real sockets."""
    listener: Listener[Any] = Listener(address, ToScheduler)
    dialer: Dialer[Any] = Dialer(address, "gateway", ToGateway)

    def has_peer() -> bool:
        dialer.poll(0.02)
        listener.poll(0.02)
        return bool(listener.peers)

    try:
        wait_until(has_peer)
        yield listener, dialer
    finally:
        dialer.close(0.0)
        listener.close(0.0)


def _poll_until_lost(link: Listener[Any], limit_s: float) -> str:
    """Return the cause of the first loss; "" if no peer is lost within `limit_s`."""
    clock = SystemClock()
    began_s = clock.now()
    while clock.now() - began_s < limit_s:
        for event in link.poll(0.02):
            if isinstance(event, Lost):
                return event.cause
    return ""


def test_closed_connection_of_killed_peer_is_reported_as_gone(
    connected_ends: tuple[Listener[Any], Dialer[Any]],
) -> None:
    """A killed process sends no goodbye, but its closed connection is reported as `gone`."""
    listener, dialer = connected_ends

    dialer.socket.close()

    assert _poll_until_lost(listener, 9.0) == "gone"


def test_stopped_peer_is_not_lost_while_its_connection_is_open(
    connected_ends: tuple[Listener[Any], Dialer[Any]],
) -> None:
    """A peer that does not read, write or poll is not lost while its connection is open."""
    listener, _ = connected_ends

    assert _poll_until_lost(listener, 3.0) == ""
    assert listener.peers
