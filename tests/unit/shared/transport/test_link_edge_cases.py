"""Links in rare moments: a late wake or welcome, a message too long, a peer of another version."""

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from shared import limits
from shared.errors import LinkFull
from shared.messages import AbortRequest, QueryStatus, RequestFailed, ToGateway, ToScheduler
from shared.transport import codec, sockets
from shared.transport.links import Connected, Dialer, LinkEvent, Listener, Lost, Received

DEADLINE_S = 30.0


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A free address on this machine."""
    return f"ipc://{tmp_path}/l.sock"


class _Pair:
    """Both ends of a link, and what each has heard."""

    def __init__(self, address: str) -> None:
        self.listener: Listener[ToScheduler] = Listener(address, ToScheduler)
        self.dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway)
        self.heard: list[LinkEvent[Any]] = []

    def until_heard(self, count: int) -> list[LinkEvent[Any]]:
        """Return what the listener has heard once it is so much."""
        until_s = time.monotonic() + DEADLINE_S
        while len(self.heard) < count or not self.dialer.is_connected:
            assert time.monotonic() < until_s, self.heard
            self.heard += self.listener.poll(0.005)
            self.dialer.poll(0.005)
        return self.heard

    def close(self) -> None:
        self.dialer.close(0.0)
        self.listener.close(0.0)


@pytest.fixture
def pair(address: str) -> Iterator[_Pair]:
    """A link with a session."""
    pair = _Pair(address)
    pair.until_heard(1)
    yield pair
    pair.close()


def test_who_is_drained_is_told_of_what_comes(pair: _Pair) -> None:
    """The descriptor misses nothing, though sends swallow its news: who is drained may wait."""
    peer = pair.listener.peers[0]
    heard: list[LinkEvent[Any]] = []
    waits = 0
    while len(heard) < 60:
        pair.listener.poll(0.0)
        pair.listener.send(peer, RequestFailed(cause="failed", request_id="a", detail=""))
        if len(heard) % 2:
            # ZeroMQ looks at its queue in a send when it has not done so for a millisecond.
            time.sleep(0.005)
            pair.dialer.send(QueryStatus())
        if pair.dialer.socket.is_drained:
            waits += 1
            assert select.select([pair.dialer.fileno()], [], [], DEADLINE_S)[0], len(heard)
        heard += pair.dialer.poll(0.0, 1)
        while not pair.dialer.socket.is_drained:
            heard += pair.dialer.poll(0.0, 1)

    assert 20 <= waits <= 50


_LEAVES_AT_ONCE = """
import os, signal, sys
from shared.messages import ToGateway
from shared.transport.links import Dialer
signal.alarm(60)
for _ in range(12):
    if os.fork() == 0:
        signal.alarm(60)
        link = Dialer(sys.argv[1], "gateway", ToGateway)
        while not link.is_connected:
            link.poll(0.01)
        link.close(0.0)
        os._exit(0)
    os.wait()
"""


def test_a_goodbye_leaves_before_its_process(address: str) -> None:
    """A process that ends right after `close` has said goodbye: nobody waits until it is gone."""
    listener: Listener[ToScheduler] = Listener(address, ToScheduler)
    causes: list[str] = []
    with subprocess.Popen([sys.executable, "-c", _LEAVES_AT_ONCE, address]) as leaving:
        try:
            until_s = time.monotonic() + DEADLINE_S
            while len(causes) < 12 and time.monotonic() < until_s:
                causes += [one.cause for one in listener.poll(0.01) if isinstance(one, Lost)]
            assert leaving.wait(DEADLINE_S) == 0
        finally:
            leaving.kill()
            listener.close(0.0)

    assert causes == ["goodbye"] * 12


def test_nothing_holds_up_a_close(pair: _Pair) -> None:
    """ZeroMQ may be busy, for example with a name that is resolved: `close` returns all the same,
    and what it waits for ends by itself."""
    context = pair.dialer.socket._context
    busy = context.socket(zmq.PAIR)
    began_s = time.monotonic()
    pair.dialer.close(0.0)
    closed_s = time.monotonic()
    was_held = context in sockets._open_contexts
    busy.close(0)
    while context in sockets._open_contexts:
        assert time.monotonic() < closed_s + DEADLINE_S
        time.sleep(0.01)

    assert was_held
    assert closed_s - began_s < DEADLINE_S


_FORGETS = """
import gc, sys
from shared.messages import ToGateway
from shared.transport.links import Dialer
link = Dialer(sys.argv[1], "gateway", ToGateway)
link.itself = link
del link
gc.collect()
"""


def test_a_forgotten_link_holds_up_nothing(address: str) -> None:
    """A link that was never closed and is collected as a cycle: the process goes on, and ends."""
    subprocess.run([sys.executable, "-c", _FORGETS, address], check=True, timeout=DEADLINE_S)


class _Scripted:
    """A listener that says what a test wants said, as which incarnation it wants."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    def take(self, dialer: Dialer[ToGateway]) -> tuple[bytes, list[Any]]:
        """Return the next frame of the dialler: its identity and its header."""
        until_s = time.monotonic() + DEADLINE_S
        while not self._socket.poll(5):
            assert time.monotonic() < until_s
            dialer.poll(0.0)
        parts = self._socket.recv_multipart()
        return parts[0], msgpack.unpackb(parts[1])

    def say(self, peer: bytes, kind: str, sender: int, receiver: int) -> None:
        header = (limits.PROTOCOL_VERSION, 0, sender, receiver, 0, 0, kind)
        self._socket.send_multipart([peer, codec.pack_header(header)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _taken(number: int) -> tuple[set[int], tuple[socket.socket, socket.socket]]:
    """Open a connection to ourselves, with descriptors up to `number`, each the lowest free one."""
    pair = socket.socketpair()
    for one in pair:
        one.setblocking(False)
    copies: set[int] = set()
    while max(*copies, *(one.fileno() for one in pair)) < number:
        copies.add(os.dup(pair[0].fileno()))
    return copies, pair


def test_a_late_wake_writes_into_nobody_elses_file(address: str) -> None:
    """A thread that wakes a link which has been closed: its descriptors belong to others by now."""
    for _ in range(50):
        dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway)
        number = dialer.socket._wake_write
        dialer.close(0.0)
        copies, pair = _taken(number)
        # ZeroMQ's threads open descriptors too, and may have been first.
        is_ours = number in copies | {one.fileno() for one in pair}
        try:
            dialer.wake()
            for one in pair:
                with pytest.raises(BlockingIOError):
                    one.recv(1)
        finally:
            for copy in copies:
                os.close(copy)
            for one in pair:
                one.close()
        if is_ours:
            return
    pytest.fail("the link's descriptor was never given again")


def test_a_message_that_no_peer_accepts_holds_up_nothing(pair: _Pair) -> None:
    """It is refused by `send`, and what follows arrives.

    Sent, it would end the connection, and again at each resend; both ends stay alive and say so,
    and nothing behind it ever arrives.
    """
    with pytest.raises(LinkFull, match="longer"):
        pair.dialer.send(AbortRequest(request_id="x" * (limits.MESSAGE_BYTES_MAX + 1)))
    pair.dialer.send(QueryStatus())

    first, second = pair.until_heard(2)
    assert isinstance(first, Connected)
    assert isinstance(second, Received)
    assert isinstance(second.message, QueryStatus)


def test_a_welcome_for_a_session_that_ends_begins_none(address: str) -> None:
    """A hello that lay in a pipe reaches the listener's successor, whose welcome comes late.

    It is for an incarnation that ends with it; a session on it would be reset with all that was
    said in it.
    """
    scripted = _Scripted(address)
    dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway)
    events: list[LinkEvent[Any]] = []

    def poll_until(count: int) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while len(events) < count:
            assert time.monotonic() < until_s, events
            events.extend(dialer.poll(0.005))

    try:
        peer, hello = scripted.take(dialer)
        scripted.say(peer, "welcome", 7, hello[2])
        poll_until(1)
        scripted.say(peer, "welcome", 8, hello[2])
        poll_until(2)
        while hello[6] != "hello" or hello[2] != dialer.incarnation:
            assert not dialer.is_connected
            peer, hello = scripted.take(dialer)
        scripted.say(peer, "welcome", 8, hello[2])
        poll_until(3)
    finally:
        dialer.close(0.0)
        scripted.close()

    assert [type(event) for event in events] == [Connected, Lost, Connected]
    assert [event.incarnation for event in events if isinstance(event, Connected)] == [7, 8]


def test_a_peer_of_another_version_is_named(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once in a while: it waits for a session for ever, and somebody must learn why."""
    listener: Listener[ToScheduler] = Listener(address, ToScheduler)
    context = zmq.Context()
    other = context.socket(zmq.DEALER)
    other.setsockopt(zmq.LINGER, 0)
    other.connect(address)
    try:
        with caplog.at_level(logging.WARNING, "lockstep.link"):
            for _ in range(5):
                other.send(codec.pack_header((limits.PROTOCOL_VERSION + 1, 0, 5, 0, 0, 0, "hello")))
            until_s = time.monotonic() + DEADLINE_S
            while listener.counters.refused < 5:
                assert time.monotonic() < until_s
                listener.poll(0.01)
    finally:
        other.close()
        context.term()
        listener.close(0.0)

    (record,) = [one for one in caplog.records if one.message == "frame_refused"]
    fields = vars(record)["fields"]
    assert f"protocol version {limits.PROTOCOL_VERSION + 1}" in fields["cause"]
    assert fields["link"] == address
