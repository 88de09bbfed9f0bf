"""Connections that are none of ours, or died halfway, at a listener with keys."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import limits
from shared.clock import ManualClock
from shared.messages import AbortRequest, ToGateway, ToScheduler
from shared.transport.links import Connected, Dialer, Listener, Lost, Received
from tests.unit.shared.transport.authentication.keyed_hosts import (
    ANY_PORT,
    HELLO,
    Event,
    Hosts,
    connect,
    run_for,
    run_until,
)

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
"""Each is a whole session's beginning at a listener without keys."""

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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Four hosts with keys."""
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


@pytest.fixture
def listener(hosts: Hosts) -> Listener[ToScheduler]:
    """The head's listener for gateways."""
    return hosts.listen()


def _call(listener: Listener[ToScheduler]) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])))


def _say(connection: socket.socket, junk: bytes) -> None:
    connection.sendall(junk[:64])
    with contextlib.suppress(OSError):  # it hangs up on nonsense
        if junk.startswith(_SIGNATURE + b"\x03") and junk[64:]:
            # ZeroMQ refuses a greeting and a handshake in one piece. It answers the former whole,
            # or hangs up.
            connection.settimeout(10.0)
            heard = 0
            while heard < 64 and (part := connection.recv(64 - heard)):
                heard += len(part)
        connection.sendall(junk[64:])


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_only_curve_is_a_way_in(listener: Listener[ToScheduler], junk: bytes) -> None:
    """What does not speak CURVE brings no frame through, whatever version it claims."""
    events: list[Event] = []

    with _call(listener) as connection:
        _say(connection, junk)
        run_for(0.3, (listener, events))

    assert events == []
    assert listener.peers == []
    assert listener.counters.refused == listener.counters.stale == 0


@pytest.mark.parametrize("opening", OLD_PROTOCOLS.values(), ids=OLD_PROTOCOLS.keys())
def test_without_keys_the_same_bytes_are_a_way_in(opening: bytes) -> None:
    """The old protocols of the test above are spoken well enough to begin a session."""
    plain: Listener[ToScheduler] = Listener(ANY_PORT, ToScheduler)
    events: list[Event] = []

    with _call(plain) as connection:
        _say(connection, opening)
        run_until(lambda: bool(events), (plain, events))
    plain.close(0.0)

    assert isinstance(events[0], Connected)


def test_garbage_on_the_port_hurts_nobody(hosts: Hosts, listener: Listener[ToScheduler]) -> None:
    """1,000 connections with junk, 100 open at a time: a session goes on, nothing is heard.

    Afterwards all their descriptors are gone.
    """
    dialer = hosts.dial(hosts.gateway, listener.address)
    peer = connect(listener, dialer)
    descriptors = _settled()[0]
    open_ones: list[socket.socket] = []
    events: list[Event] = []
    junk = list(JUNK.values())

    for number in range(1_000):
        open_ones.append(_call(listener))
        open_ones[-1].sendall(junk[number % len(junk)])
        if len(open_ones) > 100:
            open_ones.pop(0).close()
        if number % 10 == 0:
            dialer.send(AbortRequest(request_id=f"r{number}"))
            events += listener.poll(0.0)
            dialer.poll(0.0)
    run_until(lambda: len(events) == 100, (listener, events), (dialer, []))
    for one in open_ones:
        one.close()
    run_until(lambda: _settled()[0] <= descriptors, (listener, events), (dialer, []))

    assert [type(event) for event in events] == [Received] * 100
    assert listener.peers == [peer]
    hosts.check_health(listener)


def test_without_its_door_a_listener_lets_nobody_in(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """If the place that handshakes ask is gone, the answer is no."""
    assert listener.socket._zap is not None
    listener.socket._zap.close(linger=0)
    dealer = hosts.dial_raw(hosts.gateway, listener.address, b"gateway-1f")
    dealer.send(HELLO)

    assert not listener.socket._socket.poll(1_500)


def test_a_connection_that_died_without_a_word_is_replaced(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """While the listener still holds the old one's identity, the dialler comes under another."""
    relay = Relay(int(listener.address.rpartition(":")[2]))
    clock = ManualClock()
    dialer = hosts.dial(hosts.gateway, f"tcp://127.0.0.1:{relay.port}", clock=clock)
    first = _reconnect(listener, dialer, clock)

    relay.cut_diallers_side()
    run_until(lambda: relay.count == 2, (listener, []), (dialer, []))
    run_for(0.5, (listener, []), (dialer, []))
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

    run_until(is_connected, (listener, heard), (dialer, []))
    return [event.peer for event in heard if isinstance(event, Connected)][-1]


def test_closing_leaves_nothing_behind(hosts: Hosts) -> None:
    """Descriptors and threads are back to where they were after listeners and diallers closed."""
    listener = hosts.listen()
    hosts.dial(hosts.gateway, listener.address).close(0.0)  # what a process makes once stays
    listener.close(0.0)
    before = _settled()

    for _ in range(5):
        listener = hosts.listen()
        dialer = hosts.dial(hosts.gateway, listener.address)
        connect(listener, dialer)
        dialer.close()
        listener.close()

    until_s = time.monotonic() + 60.0
    while any(now > then for now, then in zip(_counts(), before, strict=True)):
        assert time.monotonic() < until_s, (_counts(), before)
        time.sleep(0.01)


class Relay:
    """Forwards a dialler's bytes; can end its side and keep the listener's."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def count(self) -> int:
        """Connections so far."""
        return len(self._pairs)

    def cut_diallers_side(self) -> None:
        """End the diallers' connections; the listener hears nothing of it."""
        for ours, _ in self._pairs:
            ours.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
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


def _settled() -> tuple[int, int]:
    """Return descriptors and threads once ZeroMQ has closed in the background what was closed."""
    counts = [_counts()]
    while counts[-20:] != [counts[-1]] * 20:
        time.sleep(0.01)
        counts.append(_counts())
    return counts[-1]


def _counts() -> tuple[int, int]:
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
    return len(list(Path("/dev/fd").iterdir())), threads
