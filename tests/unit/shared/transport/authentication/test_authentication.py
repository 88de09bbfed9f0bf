"""Listeners with keys over real sockets: which keys get a session in which role."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from services.commands.keys import host_keys
from shared import limits
from shared.clock import ManualClock
from shared.errors import ConfigError
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
from tests.support.waiting import wait_until_async
from tests.unit.shared.transport.authentication import keyed_hosts
from tests.unit.shared.transport.authentication.keyed_hosts import Hosts, connect
from tests.unit.shared.transport.link_polling import Event, poll_for, poll_until

REFUSED_S = 1.0
"""Time in which an intruder makes many handshakes and sends many hellos."""


def test_link_with_allowed_keys_delivers_messages_in_order_both_ways(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """With allowed keys a link carries 1,000 messages in each direction."""
    dialer = hosts.dial(hosts.gateway, listener.address)
    peer = connect(listener, dialer)
    up: list[Event] = []
    down: list[Event] = []

    for number in range(1_000):
        dialer.send(AbortRequest(request_id=f"r{number}"), epoch=number)
        listener.send(peer, Failed(cause="failed", request_id=f"r{number}", detail=""))
    poll_until(lambda: len(up) == len(down) == 1_000, (listener, up), (dialer, down))

    names = [f"r{number}" for number in range(1_000)]
    assert [event.message.request_id for event in up if isinstance(event, Received)] == names
    assert [event.message.request_id for event in down if isinstance(event, Received)] == names
    assert listener.counters.strangers == dialer.counters.strangers == 0


def test_dialer_with_host_key_gets_session_at_listener_of_that_host(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """Processes of the scheduler's host dial it with the key that `keys new` created."""
    dialer = hosts.dial(hosts.scheduler, listener.address)

    assert connect(listener, dialer).startswith(b"gateway-")


async def test_dialer_with_key_receives_messages_in_asyncio_event_loop(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """The gateway polls its link when the descriptor is readable, and by a timer."""
    is_over = threading.Event()
    echoed: list[str] = []

    def echo() -> None:
        while not is_over.is_set():
            for event in listener.poll(0.01):
                match event:
                    case Received(peer, _, AbortRequest(request_id=text)):
                        listener.send(peer, Failed(cause="failed", request_id=text, detail=""))

    def poll_dialer() -> bool:
        while events := dialer.poll(0.0, 32):
            got = [event.message for event in events if isinstance(event, Received)]
            echoed.extend(message.request_id for message in got if isinstance(message, Failed))
        return dialer.is_connected

    thread = threading.Thread(target=echo)
    thread.start()
    dialer = hosts.dial(hosts.gateway, listener.address)
    loop = asyncio.get_running_loop()
    loop.add_reader(dialer.fileno(), poll_dialer)
    try:
        await wait_until_async(poll_dialer, 30.0, poll_s=limits.ACK_DELAY_S)
        for number in range(100):
            dialer.send(AbortRequest(request_id=f"r{number}"))
        await wait_until_async(
            lambda: poll_dialer() and len(echoed) >= 100, 30.0, poll_s=limits.ACK_DELAY_S
        )
    finally:
        loop.remove_reader(dialer.fileno())
        is_over.set()
        thread.join()

    assert echoed == [f"r{number}" for number in range(100)]


def _without_keys(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(None, address)


def _with_unknown_key(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(hosts.unknown, address)


def _with_key_for_another_link(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(hosts.rank, address, "rank")


def _as_another_role(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(hosts.gateway, address, "status")


def _as_unknown_role(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    return hosts.dial(hosts.gateway, address, "king")


def _expecting_another_listener(hosts: Hosts, address: str) -> Dialer[ToGateway]:
    folder = hosts.gateway.folder
    host_keys.remove(folder, "scheduler-host")
    host_keys.allow(folder, hosts.unknown.public, "wrong", ["scheduler"])
    dialer = hosts.dial(hosts.gateway, address)
    host_keys.remove(folder, "wrong")
    host_keys.allow(folder, hosts.scheduler.public, "scheduler-host", ["scheduler"])
    return dialer


@pytest.mark.parametrize(
    ("dial_as_intruder", "is_counted"),
    [
        (_without_keys, False),
        (_with_unknown_key, True),
        (_with_key_for_another_link, True),
        (_as_another_role, True),
        (_as_unknown_role, True),
        (_expecting_another_listener, False),
    ],
)
def test_dialer_gets_no_session_when_its_key_or_role_is_not_allowed(
    hosts: Hosts,
    listener: Listener[ToScheduler],
    dial_as_intruder: Callable[[Hosts, str], Dialer[ToGateway]],
    is_counted: bool,
) -> None:
    """Without an allowed key and its role no session begins, and other peers are served."""
    intruder = dial_as_intruder(hosts, listener.address)
    events: list[Event] = []
    own: list[Event] = []
    counters = (listener if is_counted else intruder).counters

    poll_until(lambda: counters.strangers > 0, (listener, events), (intruder, own))
    poll_for(REFUSED_S, (listener, events), (intruder, own))

    assert events == own == []
    assert listener.peers == []
    assert (listener.counters.strangers > 0) is is_counted
    assert listener.counters.strangers + intruder.counters.strangers > 0
    hosts.check_health(listener)


def test_dialer_with_key_gets_no_session_at_listener_without_keys(hosts: Hosts) -> None:
    """A listener without keys cannot be the scheduler that the dialler expects."""
    plain: Listener[ToScheduler] = Listener(keyed_hosts.ANY_PORT, ToScheduler)
    dialer = hosts.dial(hosts.gateway, plain.address)
    other = hosts.dial(None, plain.address)
    events: list[Event] = []

    poll_until(lambda: other.is_connected, (plain, events), (dialer, []), (other, []))
    poll_for(REFUSED_S, (plain, events), (dialer, []), (other, []))
    plain.close(0.0)

    assert not dialer.is_connected
    assert other.is_connected
    assert [type(event) for event in events] == [Connected]


def test_listener_refuses_and_counts_frames_of_role_its_key_may_not_use(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """The key is allowed, but not in the role that its identity claims."""
    dealer = hosts.dial_raw(hosts.gateway, listener.address, b"status-1f")
    body = codec.encode(QueryStatus())
    for number in range(500):
        dealer.send_multipart([keyed_hosts.HELLO])
        header = msgpack.packb([limits.PROTOCOL_VERSION, 1, 5, 0, number, 0, "m"])
        dealer.send_multipart([header, body])
    events: list[Event] = []

    poll_until(lambda: listener.counters.strangers >= 1_000, (listener, events))

    assert events == []
    assert listener.peers == []
    assert not dealer.poll(100)


def test_session_ends_when_frames_with_its_identity_use_another_key(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """Frames from another key, allowed or not, end the session and are not delivered."""
    host_keys.allow(hosts.scheduler.folder, hosts.unknown.public, "mac-3", ["gateway"])
    connect(listener, hosts.dial(hosts.unknown, listener.address))
    victim = hosts.dial(hosts.gateway, listener.address)
    peer = connect(listener, victim)
    victim.socket.close()  # As after SIGKILL: the session lasts until its silence is noticed.

    numbers = [limits.PROTOCOL_VERSION, 1, victim.incarnation, listener.incarnation, 1, 0, "m"]
    frames = [msgpack.packb(numbers), codec.encode(QueryStatus())]
    steal = hosts.identity_thief(hosts.unknown, listener.address, bytes(peer), frames)
    events: list[Event] = []

    def is_refused() -> bool:
        steal()
        return listener.counters.stale > 0

    poll_until(is_refused, (listener, events))

    assert events == [Lost(peer, "another key uses its identity")]
    assert peer not in listener.peers


def test_dialer_gets_session_without_restart_when_its_key_becomes_allowed(
    hosts: Hosts, listener: Listener[ToScheduler]
) -> None:
    """`lockstep keys allow` takes effect while listener and dialler run."""
    dialer = hosts.dial(hosts.unknown, listener.address)
    poll_until(lambda: dialer.counters.strangers > 0, (listener, []), (dialer, []))
    assert not dialer.is_connected

    host_keys.allow(hosts.scheduler.folder, hosts.unknown.public, "mac-3", ["gateway"])

    assert connect(listener, dialer).startswith(b"gateway-")


def test_session_ends_when_key_is_removed(hosts: Hosts, listener: Listener[ToScheduler]) -> None:
    """`lockstep keys remove` ends the session, and no later message of that key is delivered."""
    dialer = hosts.dial(hosts.gateway, listener.address)
    peer = connect(listener, dialer)
    kept = hosts.dial(hosts.scheduler, listener.address)
    kept_peer = connect(listener, kept)
    events: list[Event] = []

    host_keys.remove(hosts.scheduler.folder, "mac-1")
    poll_until(lambda: bool(events), (listener, events), (kept, []), (dialer, []))
    poll_for(REFUSED_S, (listener, events), (dialer, []), (kept, []))

    assert events == [Lost(peer, "its key is no longer allowed")]
    assert not dialer.is_connected
    assert listener.peers == [kept_peer]


@pytest.mark.proof
@pytest.mark.parametrize("damage", ["malformed", "gone", "writable"])
def test_sessions_continue_when_allowed_list_becomes_unusable(
    hosts: Hosts, listener: Listener[ToScheduler], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """An unusable list is logged as one error, and the keys of the last good list stay allowed."""
    dialer = hosts.dial(hosts.gateway, listener.address)
    connect(listener, dialer)
    path = hosts.scheduler.folder / "allowed"
    if damage == "malformed":
        path.write_text("half a li")
    elif damage == "gone":
        path.unlink()
    else:
        path.chmod(0o666)
    events: list[Event] = []

    def error_is_logged() -> bool:
        return any(record.levelname == "ERROR" for record in caplog.records)

    poll_until(error_is_logged, (listener, events), (dialer, []))
    poll_for(REFUSED_S, (listener, events), (dialer, []))

    assert events == []
    hosts.check_health(listener)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.message for record in errors] == ["allowed_keys_unreadable"]
    assert str(path) in errors[0].__dict__["fields"]["cause"]


def test_two_listeners_of_one_process_allow_different_roles(hosts: Hosts) -> None:
    """Two listeners in one LinkSet each check keys and roles by themselves."""
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

    poll_until(serve, *[(dialer, []) for dialer in diallers])
    poll_for(REFUSED_S, *[(dialer, []) for dialer in diallers], (gateways, []), (ranks, []))

    assert served in ([gateways, ranks], [ranks, gateways])
    assert [dialer.is_connected for dialer in diallers] == [True, True, False, False]
    names = [peer.partition(b"-")[0] for peer in gateways.peers + ranks.peers]
    assert names == [b"gateway", b"rank"]


def test_listener_logs_refused_public_key_with_command_that_allows_it(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """A listener with an empty list starts, warns, and logs a refused public key once, never a
    secret."""
    for name in ("mac-1", "mac-2", host_keys.OWN_NAME):
        host_keys.remove(hosts.scheduler.folder, name)
    listener = hosts.listen()
    dialer = hosts.dial(hosts.gateway, listener.address)

    poll_until(lambda: listener.counters.strangers >= 2, (listener, []), (dialer, []))

    said = [(record.message, record.__dict__["fields"]) for record in caplog.records]
    assert [event for event, _ in said if event != "key_refused"] == ["no_peer_allowed"]
    refusals = [fields for event, fields in said if event == "key_refused"]
    (by_listener,) = [fields for fields in refusals if "remedy" in fields]
    assert by_listener["public_key"] == hosts.gateway.public
    assert by_listener["peer_address"] == "127.0.0.1"
    assert f"lockstep keys allow '{hosts.gateway.public}' NAME" in by_listener["remedy"]
    (by_dialer,) = [fields for fields in refusals if "remedy" not in fields]
    assert "not allowed there" in by_dialer["why"] == dialer.refusal
    assert not [one for one in (hosts.scheduler, hosts.gateway) if one.secret in str(said)]


def test_refused_key_is_logged_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Each key is logged once a minute, and at most 20 keys are; the number of others follows
    later."""
    clock = ManualClock()
    refusal_log = RefusalLog(clock)
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


def test_dialer_raises_error_unless_one_allowed_peer_has_listener_role(hosts: Hosts) -> None:
    """The expected key is that of the only peer with the role; several or no such peers are an
    error."""
    folder, own = hosts.gateway.folder, hosts.gateway.public
    assert listener_key(folder, own, "scheduler") == hosts.scheduler.public
    assert listener_key(folder, own, "store") == own

    host_keys.allow(folder, hosts.unknown.public, "second", ["scheduler"])
    with pytest.raises(ConfigError, match="scheduler-host, second"):
        hosts.dial(hosts.gateway, "tcp://127.0.0.1:9")
    for name in ("scheduler-host", "second", host_keys.OWN_NAME):
        host_keys.remove(folder, name)
    with pytest.raises(ConfigError, match="--role scheduler"):
        hosts.dial(hosts.gateway, "tcp://127.0.0.1:9")


def test_link_without_keys_refuses_address_off_loopback(hosts: Hosts, tmp_path: Path) -> None:
    """Both ends raise the error with the command that creates keys."""
    elsewhere = "tcp://192.0.2.1:5555"  # Reserved for documentation (RFC 5737): no host has it.

    with pytest.raises(ConfigError, match="lockstep keys new"):
        Listener(elsewhere, ToScheduler, keys_dir=tmp_path / "none")
    with pytest.raises(ConfigError, match="lockstep keys new"):
        Dialer(elsewhere, "rank", ToGateway, keys_dir=tmp_path / "none")
    with pytest.raises(ConfigError, match="Cannot listen"):
        Listener(elsewhere, ToScheduler, keys_dir=hosts.scheduler.folder)
    hosts.dial(hosts.gateway, elsewhere).poll(0.01)


def test_ipc_link_connects_without_keys_on_host_with_keys(hosts: Hosts, tmp_path: Path) -> None:
    """The run folder with mode 0700 protects ipc; a host with keys serves local processes without
    keys."""
    address = f"ipc://{tmp_path}/l.sock"
    link: Listener[Any] = Listener(address, ToScheduler, keys_dir=hosts.scheduler.folder)
    dialer = hosts.dial(None, address, "anything")

    connect(link, dialer)
    link.close(0.0)
