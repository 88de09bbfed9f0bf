"""Connections with other protocols, with random bytes, or dead peers, at a listener with keys."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from shared import limits
from shared.clock import ManualClock
from shared.messages import AbortRequest, ToGateway, ToScheduler
from shared.transport.links import Connected, Dialer, Listener, Lost, Received
from tests.support.waiting import wait_until
from tests.unit.shared.transport.authentication.keyed_hosts import ANY_PORT, HELLO, Hosts, connect
from tests.unit.shared.transport.link_polling import Event, poll_for, poll_until

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_NULL = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE = _SIGNATURE + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
_FRAME = bytes([0, len(HELLO)]) + HELLO

OLD_PROTOCOLS = {
    "ZMTP 1.0": b"\x01\x00" + bytes([len(HELLO) + 1, 0]) + HELLO,
    "ZMTP 2.0": _SIGNATURE + b"\x01\x05\x00\x00" + _FRAME,
    "ZMTP 3.0 NULL": _NULL + _READY + _FRAME,
}
"""Each begins a session at a listener without keys."""

JUNK = {
    **OLD_PROTOCOLS,
    "nothing": b"",
    "a byte": b"\xff",
    "half a greeting": _CURVE[:11],
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 500,
    "CURVE without a hello": _CURVE + _READY + _FRAME,
    "CURVE with a wrong hello": _CURVE + b"\x04\xc8\x05HELLO\x01\0" + b"\x55" * 192,
    "CURVE, 8 GiB": _CURVE + b"\x06\0\0\0\x02\0\0\0\0" + b"\x55" * 1_000,
    "random": bytes(range(256)) * 8,
}


def _open_connection(listener: Listener[ToScheduler]) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])))


def _send_in_two_parts(connection: socket.socket, junk: bytes) -> None:
    connection.sendall(junk[:64])
    with contextlib.suppress(OSError):  # The listener closes invalid connections.
        if junk.startswith(_SIGNATURE + b"\x03") and junk[64:]:
            # ZeroMQ refuses a greeting and a handshake in one segment. It answers the greeting
            # with 64 bytes or closes the connection.
            connection.settimeout(10.0)
            heard = 0
            while heard < 64 and (part := connection.recv(64 - heard)):
                heard += len(part)
        connection.sendall(junk[64:])


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_listener_with_keys_accepts_no_frame_without_curve_handshake(
    listener: Listener[ToScheduler], junk: bytes
) -> None:
    """A connection that does not complete a CURVE handshake delivers no frame, in any ZMTP
    version."""
    events: list[Event] = []

    with _open_connection(listener) as connection:
        _send_in_two_parts(connection, junk)
        poll_for(0.3, (listener, events))

    assert events == []
    assert listener.peers == []
    assert listener.counters.refused == listener.counters.stale == 0


@pytest.mark.parametrize("opening", OLD_PROTOCOLS.values(), ids=OLD_PROTOCOLS.keys())
def test_listener_without_keys_accepts_older_zmtp_versions(opening: bytes) -> None:
    """The same bytes begin a session at a listener without keys, so the test above sends valid
    ones."""
    plain: Listener[ToScheduler] = Listener(ANY_PORT, ToScheduler)
    events: list[Event] = []

    with _open_connection(plain) as connection:
        _send_in_two_parts(connection, opening)
        poll_until(lambda: bool(events), (plain, events))
    plain.close(0.0)

    assert isinstance(events[0], Connected)


def test_session_continues_and_descriptors_close_after_thousand_invalid_connections(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """A session continues beside 1,000 invalid connections; afterwards all their descriptors are
    closed."""
    dialer = hosts.dial(hosts.gateway, listener.address)
    peer = connect(listener, dialer)
    descriptors = _settled_counts()[0]
    connections: list[socket.socket] = []
    events: list[Event] = []
    junk = list(JUNK.values())

    for number in range(1_000):
        connections.append(_open_connection(listener))
        connections[-1].sendall(junk[number % len(junk)])
        if len(connections) > 100:
            connections.pop(0).close()
        if number % 10 == 0:
            dialer.send(AbortRequest(request_id=f"r{number}"))
            events += listener.poll(0.0)
            dialer.poll(0.0)
    poll_until(lambda: len(events) == 100, (listener, events), (dialer, []))
    for one in connections:
        one.close()
    poll_until(lambda: _settled_counts()[0] <= descriptors, (listener, events), (dialer, []))

    assert [type(event) for event in events] == [Received] * 100
    assert listener.peers == [peer]
    hosts.check_health(listener)


def test_listener_refuses_every_key_when_its_authenticator_socket_is_closed(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """If the socket that decides about handshakes is closed, no connection is accepted."""
    assert listener.socket._zap is not None
    listener.socket._zap.close(linger=0)
    dealer = hosts.dial_raw(hosts.gateway, listener.address, b"gateway-1f")
    dealer.send(HELLO)

    assert not listener.socket._socket.poll(1_500)


def test_dialer_reconnects_under_new_identity_after_dead_connection(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """The listener still holds the identity of the dead connection, so the dialler uses another
    one."""
    relay = Relay(int(listener.address.rpartition(":")[2]))
    clock = ManualClock()
    dialer = hosts.dial(hosts.gateway, f"tcp://127.0.0.1:{relay.port}", clock=clock)
    first = _reconnect(listener, dialer, clock)

    relay.close_dialers_side()
    poll_until(lambda: relay.count == 2, (listener, []), (dialer, []))
    poll_for(0.5, (listener, []), (dialer, []))
    clock.advance(limits.PEER_SILENCE_S + 0.1)
    assert any(isinstance(event, Lost) for event in dialer.poll(0.0))
    second = _reconnect(listener, dialer, clock)
    relay.close()

    assert second != first


def _reconnect(
    listener: Listener[ToScheduler], dialer: Dialer[ToGateway], clock: ManualClock
) -> bytes:
    heard: list[Event] = []

    def is_connected() -> bool:
        clock.advance(0.01)
        return dialer.is_connected

    poll_until(is_connected, (listener, heard), (dialer, []))
    return [event.peer for event in heard if isinstance(event, Connected)][-1]


def test_closed_links_leave_no_descriptors_or_threads(hosts: Hosts) -> None:
    """Descriptors and threads return to their numbers after listeners and diallers were closed."""
    listener = hosts.listen()
    hosts.dial(hosts.gateway, listener.address).close(0.0)  # Creates what exists once per process.
    listener.close(0.0)
    before = _settled_counts()

    for _ in range(5):
        listener = hosts.listen()
        dialer = hosts.dial(hosts.gateway, listener.address)
        connect(listener, dialer)
        dialer.close()
        listener.close()

    wait_until(
        lambda: all(now <= then for now, then in zip(_current_counts(), before, strict=True)),
        60.0,
        poll_s=0.01,
        failure=lambda: (_current_counts(), before),
    )


class Relay:
    """A relay of TCP connections that can close one side and keep the other."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def count(self) -> int:
        """Number of connections so far."""
        return len(self._pairs)

    def close_dialers_side(self) -> None:
        """Close the diallers' connections without the listener noticing."""
        for ours, _ in self._pairs:
            ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for pair in self._pairs:
            for one in pair:
                one.close()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._server.accept()
            except OSError:
                return
            theirs = socket.create_connection(("127.0.0.1", self._target_port))
            self._pairs.append((ours, theirs))
            for source, target in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                target.sendall(data)
        except OSError:
            pass


def _settled_counts() -> tuple[int, int]:
    """Return the numbers of descriptors and threads when ZeroMQ's background work has ended."""
    counts = [_current_counts()]
    while counts[-20:] != [counts[-1]] * 20:
        time.sleep(0.01)
        counts.append(_current_counts())
    return counts[-1]


def _current_counts() -> tuple[int, int]:
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
    return len(list(Path("/dev/fd").iterdir())), threads
