"""Listeners with keys over real sockets: who gets in, as what, and when the list changes."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from services.commands.keys import host_keys
from shared import limits
from shared.clock import ManualClock
from shared.errors import ConfigError
from shared.log import Log
from shared.messages import AbortRequest, QueryStatus, ToGateway, ToScheduler
from shared.messages import RequestFailed as Failed
from shared.transport import codec
from shared.transport.authentication import (
    REFUSAL_LOG_INTERVAL_S,
    REFUSALS_LOGGED_MAX,
    RefusalLog,
    listener_key,
)
from shared.transport.links import Connected, Dialer, LinkSet, Listener, Lost, Received
from tests.unit.shared.transport.authentication import keyed_hosts
from tests.unit.shared.transport.authentication.keyed_hosts import (
    Event,
    Hosts,
    connect,
    run_for,
    run_until,
)

DEAF_S = 1.0
"""So long an intruder is heard out: many handshakes and hellos."""


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


def test_messages_arrive_in_order_both_ways(hosts: Hosts, listener: Listener[ToScheduler]) -> None:
    """With the right keys a link carries 1,000 messages each way, as without."""
    dialer = hosts.dial(hosts.gateway, listener.address)
    peer = connect(listener, dialer)
    up: list[Event] = []
    down: list[Event] = []

    for number in range(1_000):
        dialer.send(AbortRequest(request_id=f"r{number}"), epoch=number)
        listener.send(peer, Failed(cause="failed", request_id=f"r{number}", detail=""))
    run_until(lambda: len(up) == len(down) == 1_000, (listener, up), (dialer, down))

    names = [f"r{number}" for number in range(1_000)]
    assert [event.message.request_id for event in up if isinstance(event, Received)] == names
    assert [event.message.request_id for event in down if isinstance(event, Received)] == names
    assert listener.counters.strangers == dialer.counters.strangers == 0


def test_a_host_reaches_itself(hosts: Hosts, listener: Listener[ToScheduler]) -> None:
    """The processes of the scheduler's own host dial it with the key that `keys new` made."""
    dialer = hosts.dial(hosts.head, listener.address)

    assert connect(listener, dialer).startswith(b"gateway-")


async def test_a_dialler_with_keys_works_in_an_event_loop(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """As the gateway uses it: drained when its descriptor is readable, and by a timer."""
    is_over = threading.Event()
    echoed: list[str] = []

    def echo() -> None:
        while not is_over.is_set():
            for event in listener.poll(0.01):
                match event:
                    case Received(peer, _, AbortRequest(request_id=text)):
                        listener.send(peer, Failed(cause="failed", request_id=text, detail=""))

    def drain() -> None:
        while events := dialer.poll(0.0, 32):
            got = [event.message for event in events if isinstance(event, Received)]
            echoed.extend(message.request_id for message in got if isinstance(message, Failed))

    thread = threading.Thread(target=echo)
    thread.start()
    dialer = hosts.dial(hosts.gateway, listener.address)
    loop = asyncio.get_running_loop()
    loop.add_reader(dialer.fileno(), drain)
    try:
        async with asyncio.timeout(30.0):
            while not dialer.is_connected:
                await asyncio.sleep(limits.ACK_DELAY_S)
                drain()
            for number in range(100):
                dialer.send(AbortRequest(request_id=f"r{number}"))
            while len(echoed) < 100:
                await asyncio.sleep(limits.ACK_DELAY_S)
                drain()
    finally:
        loop.remove_reader(dialer.fileno())
        is_over.set()
        thread.join()

    assert echoed == [f"r{number}" for number in range(100)]


def _without_keys(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(None, address)


def _with_an_unknown_key(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(hosts.stranger, address)


def _with_a_key_for_another_link(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(hosts.rank, address, "rank")


def _as_another_role(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(hosts.gateway, address, "status")


def _as_no_role(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(hosts.gateway, address, "king")


def _expecting_another_listener(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    folder = hosts.gateway.folder
    host_keys.remove(folder, "head")
    host_keys.allow(folder, hosts.stranger.public, "wrong", ["scheduler"])
    dialer = hosts.dial(hosts.gateway, address)
    host_keys.remove(folder, "wrong")
    host_keys.allow(folder, hosts.head.public, "head", ["scheduler"])
    return dialer


@pytest.mark.parametrize(
    ("intrude", "is_counted"),
    [
        (_without_keys, False),
        (_with_an_unknown_key, True),
        (_with_a_key_for_another_link, True),
        (_as_another_role, True),
        (_as_no_role, True),
        (_expecting_another_listener, False),
    ],
)
def test_nobody_else_gets_a_session(
    hosts: Hosts,
    listener: Listener[ToScheduler],
    intrude: Callable[[Hosts, str], Dialer[ToGateway]],
    is_counted: bool,
) -> None:
    """Without the right key and role no session begins; others are served."""
    intruder = intrude(hosts, listener.address)
    events: list[Event] = []
    own: list[Event] = []
    counters = (listener if is_counted else intruder).counters

    run_until(lambda: counters.strangers > 0, (listener, events), (intruder, own))
    run_for(DEAF_S, (listener, events), (intruder, own))

    assert events == own == []
    assert listener.peers == []
    assert (listener.counters.strangers > 0) is is_counted
    assert listener.counters.strangers + intruder.counters.strangers > 0
    hosts.check_health(listener)


def test_a_dialler_with_keys_speaks_to_no_listener_without(hosts: Hosts) -> None:
    """What has no keys is not the scheduler that the dialler knows; who has none is served."""
    plain: Listener[ToScheduler] = Listener(keyed_hosts.ANY_PORT, ToScheduler)
    dialer = hosts.dial(hosts.gateway, plain.address)
    other = hosts.dial(None, plain.address)
    events: list[Event] = []

    run_until(lambda: other.is_connected, (plain, events), (dialer, []), (other, []))
    run_for(DEAF_S, (plain, events), (dialer, []), (other, []))
    plain.close(0.0)

    assert not dialer.is_connected
    assert other.is_connected
    assert [type(event) for event in events] == [Connected]


def test_of_1000_messages_under_another_role_none_arrives(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """A key that is allowed, but not as what it says: every frame is refused and counted."""
    dealer = hosts.dial_raw(hosts.gateway, listener.address, b"status-1f")
    body = codec.encode(QueryStatus())
    for number in range(500):
        dealer.send_multipart([keyed_hosts.HELLO])
        header = msgpack.packb([limits.PROTOCOL_VERSION, 1, 5, 0, number, 0, "m"])
        dealer.send_multipart([header, body])
    events: list[Event] = []

    run_until(lambda: listener.counters.strangers >= 1_000, (listener, events))

    assert events == []
    assert listener.peers == []
    assert not dealer.poll(100)


def test_an_identity_belongs_to_the_key_that_took_it(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """Another key under the identity of a session, allowed or not, ends it and is not heard."""
    host_keys.allow(hosts.head.folder, hosts.stranger.public, "mac-3", ["gateway"])
    connect(listener, hosts.dial(hosts.stranger, listener.address))
    victim = hosts.dial(hosts.gateway, listener.address)
    peer = connect(listener, victim)
    victim.socket.close()  # as SIGKILL would: its session stands until it has been silent

    numbers = [limits.PROTOCOL_VERSION, 1, victim.incarnation, listener.incarnation, 1, 0, "m"]
    frames = [msgpack.packb(numbers), codec.encode(QueryStatus())]
    steal = hosts.thief(hosts.stranger, listener.address, bytes(peer), frames)
    events: list[Event] = []

    def is_refused() -> bool:
        steal()
        return listener.counters.stale > 0

    run_until(is_refused, (listener, events))

    assert events == [Lost(peer, "another key uses its identity")]
    assert peer not in listener.peers


def test_who_is_newly_allowed_gets_in(hosts: Hosts, listener: Listener[ToScheduler]) -> None:
    """`lockstep keys allow` takes effect while listener and dialler run."""
    dialer = hosts.dial(hosts.stranger, listener.address)
    run_until(lambda: dialer.counters.strangers > 0, (listener, []), (dialer, []))
    assert not dialer.is_connected

    host_keys.allow(hosts.head.folder, hosts.stranger.public, "mac-3", ["gateway"])

    assert connect(listener, dialer).startswith(b"gateway-")


def test_who_is_removed_is_dropped(hosts: Hosts, listener: Listener[ToScheduler]) -> None:
    """`lockstep keys remove` ends the session; nothing of that key is heard after it."""
    dialer = hosts.dial(hosts.gateway, listener.address)
    peer = connect(listener, dialer)
    kept = hosts.dial(hosts.head, listener.address)
    kept_peer = connect(listener, kept)
    events: list[Event] = []

    host_keys.remove(hosts.head.folder, "mac-1")
    run_until(lambda: bool(events), (listener, events), (kept, []), (dialer, []))
    run_for(DEAF_S, (listener, events), (dialer, []), (kept, []))

    assert events == [Lost(peer, "its key is no longer allowed")]
    assert not dialer.is_connected
    assert listener.peers == [kept_peer]


@pytest.mark.proof
@pytest.mark.parametrize("spoil", ["malformed", "gone", "writable"])
def test_a_slip_in_the_list_ends_no_session(
    hosts: Hosts, listener: Listener[ToScheduler], caplog: pytest.LogCaptureFixture, spoil: str
) -> None:
    """A list that cannot be used is an error in the log, once; who was allowed stays allowed."""
    dialer = hosts.dial(hosts.gateway, listener.address)
    connect(listener, dialer)
    path = hosts.head.folder / "allowed"
    if spoil == "malformed":
        path.write_text("half a li")
    elif spoil == "gone":
        path.unlink()
    else:
        path.chmod(0o666)
    events: list[Event] = []

    def complained() -> bool:
        return any(record.levelname == "ERROR" for record in caplog.records)

    run_until(complained, (listener, events), (dialer, []))
    run_for(DEAF_S, (listener, events), (dialer, []))

    assert events == []
    hosts.check_health(listener)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in errors] == ["allowed_keys_unreadable"]
    assert str(path) in errors[0].__dict__["fields"]["cause"]


def test_listeners_of_one_process_decide_for_themselves(hosts: Hosts) -> None:
    """Two listeners with different roles wait in one LinkSet, each with its own door."""
    gateways, ranks = hosts.listen(), hosts.listen(["rank"])
    waiter = LinkSet(gateways, ranks)
    diallers = [
        hosts.dial(hosts.gateway, gateways.address),
        hosts.dial(hosts.rank, ranks.address, "rank"),
        hosts.dial(hosts.rank, gateways.address, "rank"),
        hosts.dial(hosts.gateway, ranks.address),
    ]
    served: list[Any] = []

    def serve() -> bool:
        for link in waiter.wait(0.01):
            served.extend([link] * len(link.poll(0.0)))  # type: ignore[attr-defined]
        return diallers[0].is_connected and diallers[1].is_connected

    run_until(serve, *[(dialer, []) for dialer in diallers])
    run_for(DEAF_S, *[(dialer, []) for dialer in diallers], (gateways, []), (ranks, []))

    assert served in ([gateways, ranks], [ranks, gateways])
    assert [dialer.is_connected for dialer in diallers] == [True, True, False, False]
    names = [peer.partition(b"-")[0] for peer in gateways.peers + ranks.peers]
    assert names == [b"gateway", b"rank"]


def test_refusals_are_named_so_that_the_key_can_be_allowed(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty list: it starts, says so, and names the key that knocked, once; never a secret."""
    for name in ("mac-1", "mac-2", host_keys.OWN_NAME):
        host_keys.remove(hosts.head.folder, name)
    listener = hosts.listen()
    dialer = hosts.dial(hosts.gateway, listener.address)

    run_until(lambda: listener.counters.strangers >= 2, (listener, []), (dialer, []))

    said = [(record.message, record.__dict__["fields"]) for record in caplog.records]
    assert [event for event, _ in said if event != "key_refused"] == ["no_peer_allowed"]
    refusals = [fields for event, fields in said if event == "key_refused"]
    (by_listener,) = [fields for fields in refusals if "remedy" in fields]
    assert by_listener["public_key"] == hosts.gateway.public
    assert by_listener["peer_address"] == "127.0.0.1"
    assert f"lockstep keys allow '{hosts.gateway.public}' NAME" in by_listener["remedy"]
    (by_dialer,) = [fields for fields in refusals if "remedy" not in fields]
    assert "not allowed there" in by_dialer["why"] == dialer.refusal
    assert not [one for one in (hosts.head, hosts.gateway) if one.secret in str(said)]


def test_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A key is named once a minute, and at most 20 keys are; how many others is said later."""
    clock = ManualClock()
    refusal_log = RefusalLog(clock, Log("link"))
    for _ in range(3):
        for number in range(REFUSALS_LOGGED_MAX + 5):
            refusal_log.log_refusal(f"key {number}")
            clock.advance(0.1)
    named = [record.__dict__["fields"] for record in caplog.records]
    assert [fields["public_key"] for fields in named] == [
        f"key {n}" for n in range(REFUSALS_LOGGED_MAX)
    ]

    caplog.clear()
    clock.advance(REFUSAL_LOG_INTERVAL_S)
    refusal_log.log_refusal("key 0")

    assert [record.__dict__["fields"] for record in caplog.records] == [
        {"others": 15},
        {"public_key": "key 0"},
    ]


def test_who_listens_must_be_known(hosts: Hosts) -> None:
    """The expected key is the one peer's with the role; several or none is an error."""
    folder, own = hosts.gateway.folder, hosts.gateway.public
    assert listener_key(folder, own, "scheduler") == hosts.head.public
    assert listener_key(folder, own, "store") == own

    host_keys.allow(folder, hosts.stranger.public, "second", ["scheduler"])
    with pytest.raises(ConfigError, match="head, second"):
        hosts.dial(hosts.gateway, "tcp://127.0.0.1:9")
    for name in ("head", "second", host_keys.OWN_NAME):
        host_keys.remove(folder, name)
    with pytest.raises(ConfigError, match="--role scheduler"):
        hosts.dial(hosts.gateway, "tcp://127.0.0.1:9")


def test_off_loopback_needs_keys(hosts: Hosts, tmp_path: Path) -> None:
    """A folder without keys is none: exit 78 and the remedy, for both ends."""
    elsewhere = "tcp://192.0.2.1:5555"  # reserved for examples: nobody is there

    with pytest.raises(ConfigError, match="lockstep keys new"):
        Listener(elsewhere, ToScheduler, keys_dir=tmp_path / "none")
    with pytest.raises(ConfigError, match="lockstep keys new"):
        Dialer(elsewhere, "rank", ToGateway, keys_dir=tmp_path / "none")
    with pytest.raises(ConfigError, match="Cannot listen"):
        Listener(elsewhere, ToScheduler, keys_dir=hosts.head.folder)
    hosts.dial(hosts.gateway, elsewhere).poll(0.01)


def test_over_ipc_keys_are_not_used(hosts: Hosts, tmp_path: Path) -> None:
    """A 0700 folder guards ipc; a host with keys serves processes that have none there."""
    address = f"ipc://{tmp_path}/l.sock"
    link: Listener[Any] = Listener(address, ToScheduler, keys_dir=hosts.head.folder)
    dialer = hosts.dial(None, address, "anything")

    connect(link, dialer)
    link.close(0.0)
