"""Links in rare situations: late wakes and welcomes, overlong messages, peers of other versions."""

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
from shared.messages import (
    AbortRequest,
    QueryStatus,
    RequestFailed,
    Sampling,
    SubmitRequest,
    ToGateway,
    ToScheduler,
)
from shared.transport import codec, sockets
from shared.transport.links import Connected, Dialer, LinkEvent, Listener, Lost, Received
from tests.support.waiting import wait_until
from tests.unit.shared.transport.link_polling import Event, poll_until

DEADLINE_S = 30.0


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A free address on this machine."""
    return f"ipc://{tmp_path}/l.sock"


class _Pair:
    """Both ends of a link, and the events of the listener."""

    def __init__(self, address: str) -> None:
        self.listener: Listener[ToScheduler] = Listener(address, ToScheduler)
        self.dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway)
        self.events: list[Event] = []

    def wait_for_events(self, count: int) -> list[Event]:
        """Return the listener's events when there are `count` and the dialler is connected."""
        poll_until(
            lambda: len(self.events) >= count and self.dialer.is_connected,
            (self.listener, self.events),
            (self.dialer, []),
            deadline_s=DEADLINE_S,
        )
        return self.events

    def close(self) -> None:
        self.dialer.close(0.0)
        self.listener.close(0.0)


@pytest.fixture
def pair(address: str) -> Iterator[_Pair]:
    """A link with a session."""
    pair = _Pair(address)
    pair.wait_for_events(1)
    yield pair
    pair.close()


def test_link_descriptor_becomes_readable_when_message_arrives_after_last_one_was_read(
    pair: _Pair,
) -> None:
    """A caller that has read all messages may wait for the descriptor, although sends consume its
    signal."""
    peer = pair.listener.peers[0]
    events: list[LinkEvent[Any]] = []
    waits = 0
    while len(events) < 60:
        pair.listener.poll(0.0)
        pair.listener.send(peer, RequestFailed(cause="failed", request_id="a", detail=""))
        if len(events) % 2:
            # A send reads ZeroMQ's queue if it was last read more than a millisecond ago.
            time.sleep(0.005)
            pair.dialer.send(QueryStatus())
        if pair.dialer.socket.is_drained:
            waits += 1
            assert select.select([pair.dialer.fileno()], [], [], DEADLINE_S)[0], len(events)
        events += pair.dialer.poll(0.0, 1)
        while not pair.dialer.socket.is_drained:
            events += pair.dialer.poll(0.0, 1)

    assert 20 <= waits <= 50


def test_link_that_got_several_long_messages_reads_one_at_a_time(pair: _Pair) -> None:
    """A process with other work handles it between two documents of many megabytes."""
    prompt = bytes(limits.RECEIVED_BYTES_MAX)
    for name in "abc":
        pair.dialer.send(
            SubmitRequest(request_id=name, prompt=prompt, sampling=Sampling(seed=0), max_tokens=1)
        )
    time.sleep(0.3)  # until ZeroMQ has received all of them
    turns: list[list[str]] = []
    while sum(map(len, turns)) < 3:
        events = pair.listener.poll(DEADLINE_S)
        received = [one.message for one in events if isinstance(one, Received)]
        turns.append([one.request_id for one in received if isinstance(one, SubmitRequest)])
    assert turns == [["a"], ["b"], ["c"]]


_CLOSE_AND_EXIT = """
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


def test_closed_link_sends_goodbye_before_its_process_exits(address: str) -> None:
    """A process that exits right after `close` has sent its goodbye, so its peer need not wait."""
    listener: Listener[ToScheduler] = Listener(address, ToScheduler)
    causes: list[str] = []
    with subprocess.Popen([sys.executable, "-c", _CLOSE_AND_EXIT, address]) as process:
        try:

            def have_all_left() -> bool:
                causes.extend(
                    event.cause for event in listener.poll(0.01) if isinstance(event, Lost)
                )
                return len(causes) >= 12

            wait_until(have_all_left, DEADLINE_S, poll_s=0.0, failure=lambda: causes)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            listener.close(0.0)

    assert causes == ["goodbye"] * 12


def test_link_close_returns_while_zeromq_resolves_a_name(pair: _Pair) -> None:
    """`close` does not wait for ZeroMQ, for example while it resolves a name; the context ends
    later."""
    context = pair.dialer.socket._context
    busy = context.socket(zmq.PAIR)
    began_s = time.monotonic()
    pair.dialer.close(0.0)
    closed_s = time.monotonic()
    was_held = context in sockets._open_contexts
    busy.close(0)
    wait_until(lambda: context not in sockets._open_contexts, DEADLINE_S)

    assert was_held
    assert closed_s - began_s < DEADLINE_S


_UNCLOSED_LINK = """
import gc, sys
from shared.messages import ToGateway
from shared.transport.links import Dialer
link = Dialer(sys.argv[1], "gateway", ToGateway)
link.itself = link
del link
gc.collect()
"""


def test_process_exits_when_unclosed_link_is_in_reference_cycle(address: str) -> None:
    """A link that was never closed and is collected as a cycle blocks neither the process nor its
    end."""
    subprocess.run([sys.executable, "-c", _UNCLOSED_LINK, address], check=True, timeout=DEADLINE_S)


class _ScriptedListener:
    """A raw listener that sends the frames that a test wants, in any incarnation."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)

    def take(self, dialer: Dialer[ToGateway]) -> tuple[bytes, list[Any]]:
        """Return the identity and the header of the dialler's next frame."""

        def has_arrived() -> bool:
            if self._socket.poll(5):
                return True
            dialer.poll(0.0)
            return False

        wait_until(has_arrived, DEADLINE_S, poll_s=0.0)
        parts = self._socket.recv_multipart()
        return parts[0], msgpack.unpackb(parts[1])

    def send(self, peer: bytes, kind: str, sender: int, receiver: int) -> None:
        header = (limits.PROTOCOL_VERSION, 0, sender, receiver, 0, 0, kind)
        self._socket.send_multipart([peer, codec.pack_header(header)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _open_descriptors_up_to(number: int) -> tuple[set[int], tuple[socket.socket, socket.socket]]:
    """Open a socket pair and copies of it until `number` is among their descriptors."""
    pair = socket.socketpair()
    for one in pair:
        one.setblocking(False)
    copies: set[int] = set()
    while max(*copies, *(one.fileno() for one in pair)) < number:
        copies.add(os.dup(pair[0].fileno()))
    return copies, pair


def test_wake_of_closed_link_writes_nothing_to_reused_descriptor(address: str) -> None:
    """A thread may wake a link that was closed and whose descriptors now belong to other files."""
    for _ in range(50):
        dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway)
        number = dialer.socket._wake_write
        dialer.close(0.0)
        copies, pair = _open_descriptors_up_to(number)
        # A thread of ZeroMQ may have taken the descriptor first; then the test tries again.
        is_reused = number in copies | {one.fileno() for one in pair}
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
        if is_reused:
            return
    pytest.fail("the link's descriptor was never reused")


def test_link_refuses_overlong_message_and_delivers_next_one(pair: _Pair) -> None:
    """`send` refuses the message.

    A peer would close the connection at each attempt to send it again, and no later message would
    arrive.
    """
    with pytest.raises(LinkFull, match="longer"):
        pair.dialer.send(AbortRequest(request_id="x" * (limits.MESSAGE_BYTES_MAX + 1)))
    pair.dialer.send(QueryStatus())

    first, second = pair.wait_for_events(2)
    assert isinstance(first, Connected)
    assert isinstance(second, Received)
    assert isinstance(second.message, QueryStatus)


def test_dialer_starts_no_session_when_welcome_is_for_previous_incarnation(address: str) -> None:
    """A hello can reach the listener's successor, whose welcome then comes late.

    It is for the dialler's previous incarnation; a session on it would be reset and lose its
    messages.
    """
    listener = _ScriptedListener(address)
    dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway)
    events: list[LinkEvent[Any]] = []

    def wait_for_events(count: int) -> None:
        poll_until(lambda: len(events) >= count, (dialer, events), deadline_s=DEADLINE_S)

    try:
        peer, hello = listener.take(dialer)
        listener.send(peer, "welcome", 7, hello[2])
        wait_for_events(1)
        listener.send(peer, "welcome", 8, hello[2])
        wait_for_events(2)
        while hello[6] != "hello" or hello[2] != dialer.incarnation:
            assert not dialer.is_connected
            peer, hello = listener.take(dialer)
        listener.send(peer, "welcome", 8, hello[2])
        wait_for_events(3)
    finally:
        dialer.close(0.0)
        listener.close()

    assert [type(event) for event in events] == [Connected, Lost, Connected]
    assert [event.incarnation for event in events if isinstance(event, Connected)] == [7, 8]


def test_listener_logs_peer_of_other_protocol_version_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer of another protocol version never gets a session, so one log line names the cause."""
    listener: Listener[ToScheduler] = Listener(address, ToScheduler)
    context = zmq.Context()
    other = context.socket(zmq.DEALER)
    other.setsockopt(zmq.LINGER, 0)
    other.connect(address)
    try:
        with caplog.at_level(logging.WARNING, "lockstep.link"):
            for _ in range(5):
                other.send(codec.pack_header((limits.PROTOCOL_VERSION + 1, 0, 5, 0, 0, 0, "hello")))
            poll_until(
                lambda: listener.counters.refused >= 5, (listener, []), deadline_s=DEADLINE_S
            )
    finally:
        other.close()
        context.term()
        listener.close(0.0)

    (record,) = [one for one in caplog.records if one.message == "frame_refused"]
    fields = vars(record)["fields"]
    assert f"protocol version {limits.PROTOCOL_VERSION + 1}" in fields["cause"]
    assert fields["link"] == address
