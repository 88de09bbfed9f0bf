"""Hostile bytes on a link: they are refused and counted, and other peers are still served.

The first tests call framing, codec and delivery directly. The others use real sockets, with a
hostile peer beside a well-behaved one.
"""

import contextlib
import json
import math
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from shared import limits
from shared.errors import FrameRefused
from shared.identifiers import Incarnation
from shared.messages import (
    AbortRequest,
    FromStore,
    QueryStore,
    RequestFinished,
    StoreReported,
    ToGateway,
    ToRank,
    ToScheduler,
    ToStore,
)
from shared.transport import codec, delivery, framing
from shared.transport.delivery import Frame, Session
from shared.transport.links import Dialer, Received
from tests.support.effort import cases
from tests.support.waiting import wait_until
from tests.unit.shared.messages.message_strategies import instances
from tests.unit.shared.transport.hostile_peers import (
    HostileDialer,
    HostileListener,
    WellBehavedLink,
)
from tests.unit.shared.transport.link_polling import Event, poll_until

_ROOT = Path(__file__).resolve().parents[4]
_UNIONS = {
    "ToScheduler": ToScheduler,
    "ToGateway": ToGateway,
    "ToRank": ToRank,
    "ToStore": ToStore,
    "FromStore": FromStore,
}
_STORE = (
    "import json, sys; from shared.configuration.loading import config_from_tree; "
    "from services.cache_store.main import run; "
    "sys.exit(run(config_from_tree(json.loads(sys.argv[1]))))"
)
_PURE = settings(max_examples=cases(15, 75))
_WIRED = settings(
    max_examples=cases(10, 25),
    # No shrinking: it would wait for each deadline again.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

_NAN = struct.pack(">Bd", 0xCB, math.nan)
_HUGE = 2**32 - 1
HOSTILE = {
    "nothing": b"",
    "cut off": codec.encode(AbortRequest(request_id="a"))[:-1],
    "two values": codec.encode(AbortRequest(request_id="a")) * 2,
    "4 G array": b"\xdd" + struct.pack(">I", _HUGE),
    "4 G map": b"\xdf" + struct.pack(">I", _HUGE),
    "4 G binary": b"\xc6" + struct.pack(">I", _HUGE),
    "4 G text": b"\xdb" + struct.pack(">I", _HUGE),
    "4 G extension": b"\xc9" + struct.pack(">I", _HUGE) + b"\x01",
    "nested 4 G arrays": (b"\xdd" + struct.pack(">I", _HUGE)) * 1_000,
    "200,000 deep": b"\x91" * 200_000 + b"\xc0",
    "200,000 deep maps": b"\x81\xa1a" * 200_000 + b"\xc0",
    "an extension": b"\xd4\x01\x00",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "a reserved byte": b"\xc1",
    "no UTF-8": msgpack.packb(
        {"type": "AbortRequest", "request_id": b"\xff\xfe"}, use_bin_type=False
    ),
    "bytes for text": msgpack.packb({"type": "AbortRequest", "request_id": b"a"}),
    "NaN": b"\x82\xa4type\xa9Heartbeat\xa3now" + _NAN,
    "a number for a key": msgpack.packb({"type": "QueryStatus", 1: 2}, strict_types=True),
    "unknown kind": msgpack.packb({"type": "Shutdown"}),
    "no kind": msgpack.packb({"request_id": "a"}),
    "no map": msgpack.packb([1, 2, 3]),
    "a float": msgpack.packb(math.inf),
}


@st.composite
def _mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """Return valid bytes after random changes: cut, flipped, repeated or inserted bytes."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "nan"])):
            case "flip" if data:
                data[place] ^= draw(st.integers(1, 255))
            case "cut":
                del data[place : place + draw(st.integers(1, 40))]
            case "insert":
                data[place:place] = draw(st.binary(max_size=12))
            case "double":
                data[place:place] = data[place : place + 40]
            case "nan":
                data[place : place + 9] = _NAN
    return bytes(data)


def _bodies(union: Any) -> st.SearchStrategy[bytes]:
    """Return bodies for a link: valid, mutated, hostile, and random bytes."""
    valid = st.one_of([instances(message) for message in get_args(union)]).map(codec.encode)
    return st.one_of(
        valid, _mutated(valid), st.sampled_from(sorted(HOSTILE.values())), st.binary(max_size=200)
    )


_NUMBERS = st.one_of(
    st.integers(0, 5), st.integers(-(2**63), 2**64 - 1), st.sampled_from([2**63 - 1, 2**63])
)
_KINDS = st.sampled_from(
    [delivery.MESSAGE, delivery.HELLO, delivery.WELCOME, delivery.ALIVE, delivery.RESET,
     delivery.GOODBYE, "", "x" * 5_000, "\x00"]
)  # fmt: skip


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("union", _UNIONS.values(), ids=_UNIONS)
@_PURE
@given(data=st.data())
def test_decoder_returns_valid_message_or_refuses_any_body(union: Any, data: st.DataObject) -> None:
    """`decode` returns a valid message of this link or raises FrameRefused."""
    body = data.draw(_bodies(union))
    with contextlib.suppress(FrameRefused):
        message: msgspec.Struct = codec.Decoder(union).decode(body)
        assert isinstance(message, get_args(union))
        assert _finite(msgspec.to_builtins(message))
        assert msgspec.convert(msgspec.to_builtins(message), union) == message


@pytest.mark.parametrize("union", _UNIONS.values(), ids=_UNIONS)
@pytest.mark.parametrize("name", HOSTILE)
def test_decoder_refuses_hostile_body_and_allocates_little_memory(name: str, union: Any) -> None:
    """A body is refused without the memory for lengths that its header only claims."""
    with pytest.raises(FrameRefused):
        codec.Decoder(union).decode(HOSTILE[name])


_HEADER = st.just(b"\x97\x01\x00\x05\x06\x01\x00\xa1m")
"""A valid header."""


@_PURE
@example(parts=[])
@example(parts=[b""] * 1_000)
@given(parts=st.lists(st.one_of(st.binary(max_size=60), _mutated(_HEADER)), max_size=4))
def test_frame_parser_returns_valid_frame_or_refuses_any_parts(parts: list[bytes]) -> None:
    """A frame has one or two parts, of which the first is a header of this version."""
    with contextlib.suppress(FrameRefused):
        frame = framing.unpack(parts)
        assert 1 <= len(parts) <= 2
        assert framing.unpack(framing.pack(frame)) == frame


@_PURE
@given(frames=st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 3), _KINDS), max_size=40))
def test_session_delivers_arbitrary_frames_in_order_or_refuses_them(
    frames: list[tuple[int, int, str]],
) -> None:
    """Frames with wrong numbers are not delivered; an acknowledgement of unsent messages is
    refused."""
    session = Session(Incarnation(1), Incarnation(2), 0.0)
    session.send(0, b"x", 0.0)
    delivered: list[int] = []
    for number, acknowledged, kind in frames:
        frame = Frame(0, Incarnation(2), Incarnation(1), number, acknowledged, kind)
        try:
            if session.receive(frame, 0.0):
                delivered.append(number)
        except FrameRefused:
            assert acknowledged > 1
    assert delivered == list(range(1, len(delivered) + 1))


# --- real sockets --------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        yield Path(name)


@st.composite
def _attacks(draw: st.DrawFn, union: Any) -> list[tuple[str, Any]]:
    """Return the actions of a hostile peer: bodies, headers, raw parts and hellos."""
    changes = st.fixed_dictionaries(
        {},
        optional={
            "version": st.one_of(_NUMBERS, st.text(max_size=3)), "epoch": _NUMBERS,
            "sender": _NUMBERS, "receiver": _NUMBERS, "number": _NUMBERS,
            "acknowledged": _NUMBERS, "kind": st.one_of(_KINDS, _NUMBERS, st.none()),
        },
    )  # fmt: skip
    raw = st.lists(st.binary(max_size=80), min_size=1, max_size=4)
    return draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("body"), _bodies(union)),
                st.tuples(st.just("header"), st.tuples(changes, _bodies(union))),
                st.tuples(st.just("raw"), raw),
                st.tuples(st.just("raw"), st.just([b""] * 1_000)),
                st.tuples(st.just("hello"), st.none()),
            ),
            min_size=1,
            max_size=12,
        )
    )


def _run_attacks(hostile: HostileDialer, attacks: list[tuple[str, Any]]) -> None:
    for kind, content in attacks:
        match kind:
            case "body":
                hostile.send_body(content)
            case "header":
                hostile.send([hostile.header(**content[0]), content[1]])
            case "raw":
                hostile.send(content)
            case "hello":
                hostile.hello()


@pytest.fixture(params=["ToScheduler", "ToStore"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[WellBehavedLink]:
    """The listeners of the scheduler and of the store, each with a well-behaved peer."""
    pair = WellBehavedLink(f"ipc://{folder}/l.sock", _UNIONS[request.param])
    yield pair
    pair.close()


@_WIRED
@given(data=st.data())
def test_listener_serves_valid_peer_beside_hostile_dialer(
    pair: WellBehavedLink, data: st.DataObject
) -> None:
    """For any frames of a hostile peer, the listener raises nothing and serves the other peer."""
    hostile = HostileDialer(pair.listener.address)
    try:
        hostile.hello()
        _poll_until(hostile.take_welcome, pair.listener)
        _run_attacks(hostile, data.draw(_attacks(pair.union)))
        pair.check()
        pair.poll()
    finally:
        hostile.close()


@_WIRED
@given(data=st.data())
def test_dialer_gets_messages_after_hostile_listener(folder: Path, data: st.DataObject) -> None:
    """For any frames of a hostile listener, the dialler gets the messages of the next valid
    session."""
    address = f"ipc://{folder}/d.sock"
    hostile = HostileListener(address)
    dialer: Dialer[Any] = Dialer(address, "gateway", ToGateway)
    try:

        def has_hello() -> bool:
            hostile.read_dialer()
            return bool(hostile.dialer)

        _poll_until(has_hello, dialer)
        for kind, content in data.draw(_attacks(ToGateway)):
            match kind:
                case "body":
                    hostile.send(delivery.MESSAGE, content, number=1)
                case "header":
                    hostile.send(content[0].pop("kind", delivery.MESSAGE), content[1], **content[0])
                case "raw":
                    hostile.send_raw(content)
                case "hello":
                    hostile.send(delivery.WELCOME)
            dialer.poll(0.002)
            hostile.read_dialer()
        hostile.incarnation += 1
        _deliver_in_new_session(hostile, dialer)
    finally:
        dialer.close(0.0)
        hostile.close()


def _poll_until(condition: Callable[[], bool], link: Any) -> None:
    poll_until(condition, (link, []), deadline_s=30.0)


def _deliver_in_new_session(hostile: HostileListener, dialer: Dialer[Any]) -> None:
    """Begin a session as a restarted listener does, and deliver a message in it."""
    end = RequestFinished(
        request_id="good", finish_reason="stop", prompt_tokens=1, completion_tokens=1
    )

    def is_delivered() -> bool:
        hostile.read_dialer()
        hostile.send(delivery.WELCOME)
        hostile.send(delivery.MESSAGE, codec.encode(end), number=1)
        events = dialer.poll(0.01)
        return end in [event.message for event in events if isinstance(event, Received)]

    wait_until(is_delivered, 30.0, poll_s=0.0, failure="the dialler gets no more messages")


def test_cache_store_process_answers_after_each_hostile_message(folder: Path) -> None:
    """The store answers after each hostile body, ends cleanly, and logs no traceback."""
    address = f"ipc://{folder}/store.sock"
    config = {
        "paths": {"run_dir": str(folder)},
        "cache": {"directory": str(folder / "blocks"), "store_address": address},
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _STORE, json.dumps(config)], cwd=_ROOT, stderr=subprocess.PIPE
    )
    hostile_peers: list[HostileDialer] = []
    dialer: Dialer[FromStore] = Dialer(address, "good", FromStore)
    try:
        _query_store(dialer)
        for body in HOSTILE.values():
            hostile = HostileDialer(address)
            hostile_peers.append(hostile)
            hostile.hello()
            wait_until(hostile.take_welcome, 30.0)
            hostile.send_body(body)
            hostile.send([body] * 3)
            _query_store(dialer)
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=60)
        assert process.returncode == 0, logged.decode()
        assert b"Traceback" not in logged
    finally:
        for hostile in hostile_peers:
            hostile.close()
        dialer.close(0.0)
        process.kill()
        process.wait()


def _query_store(dialer: Dialer[FromStore]) -> None:
    """Wait until the store answers a query."""
    events: list[Event] = []
    poll_until(lambda: dialer.is_connected, (dialer, events))
    dialer.send(QueryStore())
    poll_until(
        lambda: any(
            isinstance(event, Received) and isinstance(event.message, StoreReported)
            for event in events
        ),
        (dialer, events),
    )


def test_listener_closes_only_the_connection_that_sends_oversized_frame(folder: Path) -> None:
    """A frame over MESSAGE_BYTES_MAX is not received; its connection is closed."""
    pair = WellBehavedLink(f"ipc://{folder}/l.sock", ToScheduler)
    hostile = HostileDialer(pair.listener.address)
    counters = pair.listener.counters
    try:
        for size in (2**20 + 1, limits.MESSAGE_BYTES_MAX + 1):
            hostile.send([hostile.header(), b"\x00" * size])
            pair.check()

            def has_received() -> bool:
                pair.poll()
                return counters.refused + counters.stale > 0

            wait_until(has_received, 30.0, poll_s=0.0)
        assert counters.refused + counters.stale == 1
    finally:
        hostile.close()
        pair.close()
