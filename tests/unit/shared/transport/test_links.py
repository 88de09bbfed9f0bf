"""Links over real sockets: restarts, stale peers, goodbyes, slow peers, hostile frames."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from shared import limits
from shared.errors import ConfigError, LinkFull, PeerUnknown
from shared.identifiers import PeerId
from shared.messages import AbortRequest, QueryStatus, ToGateway, ToScheduler
from shared.messages import RequestFailed as Failed
from shared.transport import codec
from shared.transport.links import Connected, Dialer, Listener, Lost, Received
from tests.unit.shared.transport.link_polling import DEADLINE_S, Event, poll_until


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
    """Open dialling ends; those that a test leaves open are closed."""
    links: list[Dialer[ToGateway]] = []

    def open_one() -> Dialer[ToGateway]:
        links.append(Dialer(address, "gateway", ToGateway))
        return links[-1]

    yield open_one
    for link in links:
        link.close(0.0)


def connect(listener: Listener[ToScheduler], dialer: Dialer[ToGateway]) -> PeerId:
    """Establish a session; return the listener's id of the dialler."""
    heard: list[Event] = []
    poll_until(lambda: dialer.is_connected, (listener, heard), (dialer, []))
    (connected,) = [event for event in heard if isinstance(event, Connected)]
    return connected.peer


def test_link_delivers_messages_in_order_both_ways(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """A link carries 2,000 messages in each direction, each with the epoch in which it was sent."""
    dialer = dial()
    peer = connect(listener, dialer)
    up: list[Event] = []
    down: list[Event] = []

    for number in range(2_000):
        dialer.send(AbortRequest(request_id=f"r{number}"), epoch=number)
        listener.send(
            peer, Failed(cause="failed", request_id=f"r{number}", detail=""), epoch=number
        )
    poll_until(lambda: len(up) == len(down) == 2_000, (listener, up), (dialer, down))

    names = [f"r{number}" for number in range(2_000)]
    assert [event.message.request_id for event in up if isinstance(event, Received)] == names
    assert [event.message.request_id for event in down if isinstance(event, Received)] == names
    assert [event.epoch for event in down if isinstance(event, Received)] == list(range(2_000))


def test_restarted_dialer_gets_new_session_without_old_messages(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """A restarted process gets a new session and no message of the old one."""
    first = dial()
    old_peer = connect(listener, first)
    listener.send(old_peer, Failed(cause="failed", request_id="old", detail=""))
    first.socket.close()  # As after SIGKILL: without a goodbye.

    second = dial()
    new_peer = connect(listener, second)
    events: list[Event] = []
    listener.send(new_peer, Failed(cause="failed", request_id="new", detail=""))
    poll_until(lambda: bool(events), (listener, []), (second, events))

    assert new_peer != old_peer
    assert [event.message.request_id for event in events if isinstance(event, Received)] == ["new"]


def test_dialer_reconnects_to_restarted_listener_before_silence_limit(
    address: str, listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """The dialler gets Lost and then Connected, earlier than the limit for silence."""
    dialer = dial()
    connect(listener, dialer)
    listener.socket.close()
    events: list[Event] = []

    again: Listener[ToScheduler] = Listener(address, ToScheduler)
    started_s = time.monotonic()
    poll_until(
        lambda: any(isinstance(event, Connected) for event in events),
        (again, []),
        (dialer, events),
    )
    again.close(0.0)

    assert [type(event) for event in events] == [Lost, Connected]
    assert time.monotonic() - started_s < limits.PEER_SILENCE_S


def test_listener_answers_frame_for_older_incarnation_with_reset(
    address: str, listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """A frame for an older incarnation is counted as stale, not delivered, and answered with a
    reset."""
    connect(listener, dial())
    dealer = _raw_dealer(address)
    for number in (1, 2):
        body = codec.encode(QueryStatus())
        header = msgpack.packb([limits.PROTOCOL_VERSION, 1, 5, 999, number, 0, "m"])
        dealer.send_multipart([header, body])
    events: list[Event] = []
    poll_until(lambda: listener.counters.stale >= 2, (listener, events))

    assert not [event for event in events if isinstance(event, Received)]
    assert dealer.poll(30_000)
    assert msgpack.unpackb(dealer.recv_multipart()[0])[-1] == "reset"
    dealer.close(linger=0)


def test_link_close_delivers_all_sent_messages_to_slow_receiver(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """5,000 messages that were sent right before `close` arrive over ipc, although the receiver is
    slow."""
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


def test_send_raises_link_full_when_peer_does_not_read(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """At the maximum of unacknowledged messages `send` fails; no accepted message is lost."""
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
    poll_until(lambda: len(events) >= taken, (dialer, events), (listener, []))
    assert taken == limits.UNACKED_MESSAGES_MAX
    assert [event.message.request_id for event in events if isinstance(event, Received)] == [
        f"r{number}" for number in range(taken)
    ]


def test_send_without_session_raises_peer_unknown(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """Neither end queues messages before there is a session."""
    with pytest.raises(PeerUnknown):
        listener.send(PeerId(b"unknown"), QueryStatus())
    with pytest.raises(PeerUnknown):
        dial().send(QueryStatus())


def test_peer_with_allowed_silence_is_lost_when_its_connection_closes(
    listener: Listener[ToScheduler], dial: Callable[[], Dialer[ToGateway]]
) -> None:
    """A process that ends while it may be silent is lost soon, as any other."""
    dialer = dial()
    peer = connect(listener, dialer)
    listener.allow_silence(peer, is_allowed=True)
    dialer.socket.close()  # As after SIGKILL: without a goodbye.
    events: list[Event] = []
    poll_until(lambda: bool(events), (listener, events))

    assert events == [Lost(peer, "gone")]


def test_second_close_of_link_leaves_reused_descriptors_open(address: str) -> None:
    """The second close does nothing, also when other files have got the link's descriptors."""
    dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway)
    dialer.close(0.0)
    reused = os.pipe()

    dialer.close(0.0)

    for descriptor in reused:
        os.fstat(descriptor)
        os.close(descriptor)


def test_link_poll_returns_early_when_another_thread_wakes_it(
    listener: Listener[ToScheduler],
) -> None:
    """`poll` returns long before its timeout."""
    threading.Timer(0.05, listener.wake).start()
    started_s = time.monotonic()

    listener.poll(DEADLINE_S)

    assert time.monotonic() - started_s < DEADLINE_S / 2


VERSION = limits.PROTOCOL_VERSION
HOSTILE = {
    "one part without header": [b"nonsense"],
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
def test_listener_counts_invalid_frame_and_starts_no_session(
    address: str, listener: Listener[ToScheduler], parts: list[bytes]
) -> None:
    """An invalid frame raises nothing from `poll` and starts no session."""
    dealer = _raw_dealer(address)
    dealer.send_multipart(parts)
    events: list[Event] = []

    poll_until(lambda: listener.counters.refused == 1, (listener, events))

    assert events == []
    assert listener.peers == []
    dealer.close(linger=0)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgpack.packb({"type": "Nonsense"}), b"\x91" * 100_000]
)
def test_session_counts_and_skips_message_with_invalid_body(
    address: str, listener: Listener[ToScheduler], body: bytes
) -> None:
    """Only the invalid message is refused; the next valid one is delivered."""
    dealer = _raw_dealer(address)
    dealer.send_multipart([msgpack.packb([VERSION, 0, 5, 0, 0, 0, "hello"])])
    events: list[Event] = []
    poll_until(lambda: len(events) == 1, (listener, events))
    own = listener.incarnation

    dealer.send_multipart([msgpack.packb([VERSION, 1, 5, own, 1, 0, "m"]), body])
    poll_until(lambda: listener.counters.refused == 1, (listener, events))
    valid = codec.encode(QueryStatus())
    dealer.send_multipart([msgpack.packb([VERSION, 1, 5, own, 2, 0, "m"]), valid])
    poll_until(lambda: len(events) == 2, (listener, events))

    assert isinstance(events[1], Received)
    assert events[1].message == QueryStatus()
    dealer.close(linger=0)


def test_listener_refuses_and_counts_peers_over_maximum(
    address: str, listener: Listener[ToScheduler]
) -> None:
    """Over the maximum of sessions a listener opens no more, and counts the refused peers."""
    dealers = [_raw_dealer(address) for _ in range(limits.PEERS_MAX + 3)]
    hello = msgpack.packb([VERSION, 0, 5, 0, 0, 0, "hello"])
    for dealer in dealers:
        dealer.send(hello)

    poll_until(lambda: listener.counters.refused == 3, (listener, []))

    assert len(listener.peers) == limits.PEERS_MAX
    for dealer in dealers:
        dealer.close(linger=0)


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
def test_link_without_keys_refuses_address_off_loopback(address: str) -> None:
    """Without keys only loopback and ipc are allowed, at both ends."""
    with pytest.raises(ConfigError):
        Listener(address, ToScheduler)
    with pytest.raises(ConfigError):
        Dialer(address, "gateway", ToGateway)


def test_second_listener_on_loopback_address_is_refused() -> None:
    """A loopback address can be bound once; the second bind is an error with the likely cause."""
    listener: Listener[ToScheduler] = Listener("tcp://127.0.0.1:*", ToScheduler)

    with pytest.raises(ConfigError, match="Another Lockstep may be running"):
        Listener(listener.address, ToScheduler)
    listener.close(0.0)


def _raw_dealer(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket
