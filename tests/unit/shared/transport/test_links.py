"""Links over real sockets: restarts, stale peers, goodbyes, slow peers, hostile frames."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from shared import limits
from shared.clock import ManualClock
from shared.errors import ConfigError, LinkFull, PeerUnknown
from shared.identifiers import PeerId
from shared.messages import AbortRequest, QueryStatus, ToGateway, ToScheduler
from shared.messages import RequestFailed as Failed
from shared.transport import codec
from shared.transport.links import Connected, Dialer, LinkEvent, Listener, Lost, Received

Event = LinkEvent[Any]
DEADLINE_S = 60.0


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A free address on this machine."""
    return f"ipc://{tmp_path}/l.sock"


@pytest.fixture
def listener(address: str) -> Iterator[Listener[ToScheduler]]:
    """The listening end."""
    link: Listener[ToScheduler] = Listener(address, ToScheduler)
    yield link
    link.close(0.0)


@pytest.fixture
def dial(address: str) -> Iterator[Callable[[], Dialer[ToGateway]]]:
    """Opens dialling ends, and closes those that a test leaves open."""
    links: list[Dialer[ToGateway]] = []

    def open_one() -> Dialer[ToGateway]:
        links.append(Dialer(address, "gateway", ToGateway))
        return links[-1]

    yield open_one
    for link in links:
        link.close(0.0)


def run_until(
    condition: Callable[[], bool], *links: tuple[Any, list[Event]], deadline_s: float = DEADLINE_S
) -> None:
    """Poll links in turn, collecting their events, until a condition holds."""
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, [events[-5:] for _, events in links]
        for link, events in links:
            events.extend(link.poll(0.005))


def connect(listener: Listener[ToScheduler], dialer: Dialer[ToGateway]) -> PeerId:
    """Bring a session about; return the listener's name for the dialler."""
    heard: list[Event] = []
    run_until(lambda: dialer.is_connected, (listener, heard), (dialer, []))
    (connected,) = [event for event in heard if isinstance(event, Connected)]
    return connected.peer


def test_messages_arrive_in_order_both_ways(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """A link carries 2,000 messages each way, in order, with the epoch they were sent in."""
    dialer = dial()
    peer = connect(listener, dialer)
    up: list[Event] = []
    down: list[Event] = []

    for number in range(2_000):
        dialer.send(AbortRequest(request_id=f"r{number}"), epoch=number)
        listener.send(
            peer, Failed(cause="failed", request_id=f"r{number}", detail=""), epoch=number
        )
    run_until(lambda: len(up) == len(down) == 2_000, (listener, up), (dialer, down))

    names = [f"r{number}" for number in range(2_000)]
    assert [event.message.request_id for event in up if isinstance(event, Received)] == names
    assert [event.message.request_id for event in down if isinstance(event, Received)] == names
    assert [event.epoch for event in down if isinstance(event, Received)] == list(range(2_000))


def test_a_restarted_dialler_is_a_new_peer(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """A process that comes back gets a new session and none of the old one's messages."""
    first = dial()
    old_peer = connect(listener, first)
    listener.send(old_peer, Failed(cause="failed", request_id="old", detail=""))
    first.socket.close()  # as SIGKILL would: without a goodbye

    second = dial()
    new_peer = connect(listener, second)
    events: list[Event] = []
    listener.send(new_peer, Failed(cause="failed", request_id="new", detail=""))
    run_until(lambda: bool(events), (listener, []), (second, events))

    assert new_peer != old_peer
    assert [event.message.request_id for event in events if isinstance(event, Received)] == ["new"]


def test_a_restarted_listener_is_noticed(
    address: str, listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """A dialler learns that its peer was restarted: Lost, then Connected, before silence tells."""
    dialer = dial()
    connect(listener, dialer)
    listener.socket.close()
    events: list[Event] = []

    again: Listener[ToScheduler] = Listener(address, ToScheduler)
    started_s = time.monotonic()
    run_until(
        lambda: any(isinstance(event, Connected) for event in events),
        (again, []),
        (dialer, events),
    )
    again.close(0.0)

    assert [type(event) for event in events] == [Lost, Connected]
    assert time.monotonic() - started_s < limits.PEER_SILENCE_S


def test_what_was_meant_for_an_older_incarnation_is_refused(
    address: str, listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """A frame for another incarnation is counted, answered with a reset, and not executed."""
    connect(listener, dial())
    stranger = _raw_dealer(address)
    for number in (1, 2):
        body = codec.encode(QueryStatus())
        header = msgpack.packb([limits.PROTOCOL_VERSION, 1, 5, 999, number, 0, "m"])
        stranger.send_multipart([header, body])
    events: list[Event] = []
    run_until(lambda: listener.counters.stale >= 2, (listener, events))

    assert not [event for event in events if isinstance(event, Received)]
    assert stranger.poll(30_000)
    assert msgpack.unpackb(stranger.recv_multipart()[0])[-1] == "reset"
    stranger.close(linger=0)


def test_goodbye_flushes_everything_to_a_slow_receiver(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """5,000 messages sent right before `close` all arrive, though the receiver is slow (ipc)."""
    dialer = dial()
    connect(listener, dialer)
    events: list[Event] = []
    is_over = threading.Event()

    def read_slowly() -> None:
        while not any(isinstance(event, Lost) for event in events) and not is_over.is_set():
            events.extend(listener.poll(0.05, count_max=50))
            time.sleep(0.001)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    for number in range(5_000):
        dialer.send(AbortRequest(request_id=f"r{number}"))
    dialer.close(DEADLINE_S)
    reader.join(DEADLINE_S)
    is_over.set()

    received = [event.message.request_id for event in events if isinstance(event, Received)]
    assert received == [f"r{number}" for number in range(5_000)]
    assert isinstance(events[-1], Lost)
    assert events[-1].cause == "goodbye"


def test_a_peer_that_stops_reading_is_refused(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """When the peer stops reading, `send` says LinkFull at the bound: no drop, bounded memory."""
    dialer = dial()
    peer = connect(listener, dialer)
    taken = 0

    try:
        while taken < 2 * limits.UNACKED_MESSAGES_MAX:
            listener.send(peer, Failed(cause="failed", request_id=f"r{taken}", detail=""))
            taken += 1
    except LinkFull:
        pass

    events: list[Event] = []
    run_until(lambda: len(events) >= taken, (dialer, events), (listener, []))
    assert taken == limits.UNACKED_MESSAGES_MAX
    assert [event.message.request_id for event in events if isinstance(event, Received)] == [
        f"r{number}" for number in range(taken)
    ]


def test_sending_without_a_session_is_refused(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """Before a session both ends say so instead of queueing for nobody."""
    with pytest.raises(PeerUnknown):
        listener.send(PeerId(b"nobody"), QueryStatus())
    with pytest.raises(PeerUnknown):
        dial().send(QueryStatus())


def test_silence_ends_a_session(address: str) -> None:
    """A peer that is there but says nothing is lost after the limit, on both clocks."""
    clock = ManualClock()
    listener: Listener[ToScheduler] = Listener(address, ToScheduler, clock)
    dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway, clock)
    events: list[Event] = []
    until_s = time.monotonic() + DEADLINE_S
    while not dialer.is_connected and time.monotonic() < until_s:
        clock.advance(limits.HELLO_INTERVAL_S)
        events += listener.poll(0.01)
        dialer.poll(0.01)

    for _ in range(5):  # hellos that crossed the welcome
        listener.poll(0.05)
        dialer.poll(0.05)
    clock.advance(limits.PEER_SILENCE_S + 0.1)
    events += listener.poll(0.0)
    dialler_events = dialer.poll(0.0)
    listener.close(0.0)
    dialer.close(0.0)

    assert [type(event) for event in events] == [Connected, Lost]
    assert [type(event) for event in dialler_events] == [Lost]


def test_closing_twice_is_harmless(address: str) -> None:
    """The second close does nothing; in particular it closes nobody else's descriptors."""
    dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway)
    dialer.close(0.0)
    reused = os.pipe()

    dialer.close(0.0)

    for descriptor in reused:
        os.fstat(descriptor)
        os.close(descriptor)


def test_wake_ends_a_wait(listener: Listener[ToScheduler]) -> None:
    """Another thread can make `poll` return long before its timeout."""
    threading.Timer(0.05, listener.wake).start()
    started_s = time.monotonic()

    listener.poll(DEADLINE_S)

    assert time.monotonic() - started_s < DEADLINE_S / 2


VERSION = limits.PROTOCOL_VERSION
HOSTILE = {
    "no parts but a header that is none": [b"nonsense"],
    "empty header": [b""],
    "header is a map": [msgpack.packb({"version": 1})],
    "header is empty": [msgpack.packb([])],
    "another version": [msgpack.packb([VERSION + 1, 1, 5, 6, 1, 0, "m"]), b"\x80"],
    "version is a word": [msgpack.packb(["1", 1, 5, 6, 1, 0, "m"]), b"\x80"],
    "version is true": [msgpack.packb([True, 1, 5, 6, 1, 0, "m"]), b"\x80"],
    "too few fields": [msgpack.packb([VERSION, 1, 5])],
    "too many fields": [msgpack.packb([VERSION, 1, 5, 6, 1, 0, "m", 0])],
    "a number is a float": [msgpack.packb([VERSION, 1, 5.5, 6, 1, 0, "m"])],
    "a number is negative": [msgpack.packb([VERSION, -1, 5, 6, 1, 0, "m"])],
    "a number is too large": [msgpack.packb([VERSION, 1, 2**64 - 1, 6, 1, 0, "m"])],
    "an extension type": [msgpack.packb([VERSION, 1, 5, msgpack.ExtType(1, b"x"), 1, 0, "m"])],
    "three parts": [msgpack.packb([VERSION, 0, 5, 0, 0, 0, "hello"]), b"", b""],
    "depth bomb": [b"\x91" * 100_000],
}


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_frames_are_counted_and_nothing_else(
    address: str, listener: Listener[ToScheduler], parts: list[bytes]
) -> None:
    """A frame that is none never raises out of `poll`, starts no session, and is counted once."""
    stranger = _raw_dealer(address)
    stranger.send_multipart(parts)
    events: list[Event] = []

    run_until(lambda: listener.counters.refused == 1, (listener, events))

    assert events == []
    assert listener.peers == []
    stranger.close(linger=0)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgpack.packb({"type": "Nonsense"}), b"\x91" * 100_000]
)
def test_a_hostile_body_in_a_session_is_counted(
    address: str, listener: Listener[ToScheduler], body: bytes
) -> None:
    """Nonsense in a session is refused message by message; the next valid one is delivered."""
    stranger = _raw_dealer(address)
    stranger.send_multipart([msgpack.packb([VERSION, 0, 5, 0, 0, 0, "hello"])])
    events: list[Event] = []
    run_until(lambda: len(events) == 1, (listener, events))
    own = listener.incarnation

    stranger.send_multipart([msgpack.packb([VERSION, 1, 5, own, 1, 0, "m"]), body])
    run_until(lambda: listener.counters.refused == 1, (listener, events))
    valid = codec.encode(QueryStatus())
    stranger.send_multipart([msgpack.packb([VERSION, 1, 5, own, 2, 0, "m"]), valid])
    run_until(lambda: len(events) == 2, (listener, events))

    assert isinstance(events[1], Received)
    assert events[1].message == QueryStatus()
    stranger.close(linger=0)


def test_strangers_cannot_fill_the_list_of_peers(
    address: str, listener: Listener[ToScheduler]
) -> None:
    """More peers than the limit are refused and counted."""
    strangers = [_raw_dealer(address) for _ in range(limits.PEERS_MAX + 3)]
    hello = msgpack.packb([VERSION, 0, 5, 0, 0, 0, "hello"])
    for stranger in strangers:
        stranger.send(hello)

    run_until(lambda: listener.counters.refused == 3, (listener, []))

    assert len(listener.peers) == limits.PEERS_MAX
    for stranger in strangers:
        stranger.close(linger=0)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:5555",
        "tcp://192.168.1.5:5555",
        "tcp://*:5555",
        "tcp://example.org:5555",
        "udp://127.0.0.1:5555",
        "127.0.0.1:5555",
        "",
        "ipc:///" + "x" * 200,
    ],
)
def test_addresses_that_strangers_reach_are_refused(address: str) -> None:
    """Links between hosts need keys; without any, only loopback and ipc are allowed."""
    with pytest.raises(ConfigError):
        Listener(address, ToScheduler)
    with pytest.raises(ConfigError):
        Dialer(address, "gateway", ToGateway)


def test_loopback_tcp_is_allowed() -> None:
    """A loopback address binds, and a second bind of it says what is wrong."""
    listener: Listener[ToScheduler] = Listener("tcp://127.0.0.1:*", ToScheduler)

    with pytest.raises(ConfigError, match="Is another Lockstep running"):
        Listener(listener.address, ToScheduler)
    listener.close(0.0)


def _raw_dealer(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket
