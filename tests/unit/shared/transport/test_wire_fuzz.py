"""Hostile bytes on a link: refused and counted, never a crash, and good peers go on meanwhile.

Pure first (framing, codec, delivery), then real sockets: a stranger with a raw ZeroMQ socket beside
a good peer, at every kind of listener and at a dialler.
"""

import contextlib
import json
import math
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
from tests.effort import cases
from tests.unit.shared.messages.message_strategies import instances
from tests.unit.shared.transport.hostile_peers import (
    HostileDialer,
    HostileListener,
    WellBehavedLink,
)

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
    # Shrinking would wait for each deadline again.
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
    """Return bytes that were valid once: cut, changed, doubled, or with something put in."""
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
    """Return bodies for a link: valid, once valid, hostile, and any bytes."""
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
def test_a_body_is_a_message_or_refused(union: Any, data: st.DataObject) -> None:
    """Promise 9: whatever the bytes, a valid message of this link or FrameRefused."""
    body = data.draw(_bodies(union))
    with contextlib.suppress(FrameRefused):
        message: msgspec.Struct = codec.Decoder(union).decode(body)
        assert isinstance(message, get_args(union))
        assert _finite(msgspec.to_builtins(message))
        assert msgspec.convert(msgspec.to_builtins(message), union) == message


@pytest.mark.parametrize("union", _UNIONS.values(), ids=_UNIONS)
@pytest.mark.parametrize("name", HOSTILE)
def test_every_hostile_body_is_refused(name: str, union: Any) -> None:
    """At once and without room for what a header only announces."""
    with pytest.raises(FrameRefused):
        codec.Decoder(union).decode(HOSTILE[name])


_HEADER = st.just(b"\x97\x01\x00\x05\x06\x01\x00\xa1m")
"""Of a frame that is right."""


@_PURE
@example(parts=[])
@example(parts=[b""] * 1_000)
@given(parts=st.lists(st.one_of(st.binary(max_size=60), _mutated(_HEADER)), max_size=4))
def test_parts_are_a_frame_or_refused(parts: list[bytes]) -> None:
    """Nothing but one or two parts with this version's header is a frame."""
    with contextlib.suppress(FrameRefused):
        frame = framing.unpack(parts)
        assert 1 <= len(parts) <= 2
        assert framing.unpack(framing.pack(frame)) == frame


@_PURE
@given(frames=st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 3), _KINDS), max_size=40))
def test_a_session_delivers_in_order_or_not_at_all(frames: list[tuple[int, int, str]]) -> None:
    """Numbers that go back or jump are not delivered; what was never sent is not acknowledged."""
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
    """A folder whose name is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name:
        yield Path(name)


@st.composite
def _attacks(draw: st.DrawFn, union: Any) -> list[tuple[str, Any]]:
    """Return what a stranger does: bodies in its session, headers of all kinds, raw parts."""
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


def _attack(stranger: HostileDialer, attacks: list[tuple[str, Any]]) -> None:
    for kind, what in attacks:
        match kind:
            case "body":
                stranger.send_body(what)
            case "header":
                stranger.send([stranger.header(**what[0]), what[1]])
            case "raw":
                stranger.send(what)
            case "hello":
                stranger.hello()


@pytest.fixture(params=["ToScheduler", "ToStore"])
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[WellBehavedLink]:
    """The scheduler's and the store's kind of listener."""
    pair = WellBehavedLink(f"ipc://{folder}/l.sock", _UNIONS[request.param])
    yield pair
    pair.close()


@_WIRED
@given(data=st.data())
def test_a_listener_serves_a_good_peer_beside_a_stranger(
    pair: WellBehavedLink, data: st.DataObject
) -> None:
    """Whatever a stranger sends, in a session or not: nothing raises, the good peer is served."""
    stranger = HostileDialer(pair.listener.address)
    try:
        stranger.hello()
        until_s = time.monotonic() + 30.0
        while not stranger.take_welcome():
            assert time.monotonic() < until_s
            pair.listener.poll(0.002)
        _attack(stranger, data.draw(_attacks(pair.union)))
        pair.check()
        pair.poll()
    finally:
        stranger.close()


@_WIRED
@given(data=st.data())
def test_a_dialler_goes_on_beside_a_false_listener(folder: Path, data: st.DataObject) -> None:
    """Whoever binds the address may send anything; then the right one is there, and is heard."""
    address = f"ipc://{folder}/d.sock"
    false = HostileListener(address)
    dialer: Dialer[Any] = Dialer(address, "gateway", ToGateway)
    try:
        until_s = time.monotonic() + 30.0
        while not false.dialer:
            assert time.monotonic() < until_s
            dialer.poll(0.002)
            false.meet()
        for kind, what in data.draw(_attacks(ToGateway)):
            match kind:
                case "body":
                    false.send(delivery.MESSAGE, what, number=1)
                case "header":
                    false.send(what[0].pop("kind", delivery.MESSAGE), what[1], **what[0])
                case "raw":
                    false.send_raw(what)
                case "hello":
                    false.send(delivery.WELCOME)
            dialer.poll(0.002)
            false.meet()
        false.own += 1
        _be_heard(false, dialer, time.monotonic() + 30.0)
    finally:
        dialer.close(0.0)
        false.close()


def _be_heard(false: HostileListener, dialer: Dialer[Any], until_s: float) -> None:
    """Begin a session as a restarted listener does, and be heard in it."""
    end = RequestFinished(
        request_id="good", finish_reason="stop", prompt_tokens=1, completion_tokens=1
    )
    heard: list[Any] = []
    while end not in heard:
        assert time.monotonic() < until_s, "the dialler does not hear any more"
        false.meet()
        false.send(delivery.WELCOME)
        false.send(delivery.MESSAGE, codec.encode(end), number=1)
        events = dialer.poll(0.01)
        heard += [event.message for event in events if isinstance(event, Received)]


def test_a_store_process_serves_beside_strangers(folder: Path) -> None:
    """The store itself: every hostile body in a session of its own, and it answers as before."""
    address = f"ipc://{folder}/store.sock"
    config = {
        "paths": {"run_dir": str(folder)},
        "cache": {"directory": str(folder / "blocks"), "store_address": address},
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _STORE, json.dumps(config)], cwd=_ROOT, stderr=subprocess.PIPE
    )
    strangers: list[HostileDialer] = []
    dialer: Dialer[FromStore] = Dialer(address, "good", FromStore)
    try:
        _ask_store(dialer)
        for body in HOSTILE.values():
            stranger = HostileDialer(address)
            strangers.append(stranger)
            stranger.hello()
            until_s = time.monotonic() + 30.0
            while not stranger.take_welcome():
                assert time.monotonic() < until_s
                time.sleep(0.005)
            stranger.send_body(body)
            stranger.send([body] * 3)
            _ask_store(dialer)
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=60)
        assert process.returncode == 0, logged.decode()
        assert b"Traceback" not in logged
    finally:
        for stranger in strangers:
            stranger.close()
        dialer.close(0.0)
        process.kill()
        process.wait()


def _ask_store(dialer: Dialer[FromStore]) -> None:
    until_s = time.monotonic() + 60.0
    is_asked = False
    while True:
        assert time.monotonic() < until_s, "the store does not answer"
        for event in dialer.poll(0.02):
            if isinstance(event, Received) and isinstance(event.message, StoreReported):
                return
        if dialer.is_connected and not is_asked:
            is_asked = True
            dialer.send(QueryStore())


def test_a_frame_beyond_the_bound_ends_only_its_connection(folder: Path) -> None:
    """One byte more than MESSAGE_BYTES_MAX: its sender is cut off before it takes our memory."""
    pair = WellBehavedLink(f"ipc://{folder}/l.sock", ToScheduler)
    stranger = HostileDialer(pair.listener.address)
    counters = pair.listener.counters
    try:
        for size in (2**20 + 1, limits.MESSAGE_BYTES_MAX + 1):
            stranger.send([stranger.header(), b"\x00" * size])
            pair.check()
            until_s = time.monotonic() + 30.0
            while counters.refused + counters.stale == 0:
                assert time.monotonic() < until_s, "what is not too large is not heard"
                pair.poll()
        assert counters.refused + counters.stale == 1
    finally:
        stranger.close()
        pair.close()
