"""Hosts with keys that know each other, and links between them over loopback."""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

from services.commands.keys import host_keys
from shared import limits
from shared.clock import Clock
from shared.identifiers import PeerId
from shared.messages import AbortRequest, ToGateway, ToScheduler
from shared.transport import sockets
from shared.transport.keys import Keys
from shared.transport.links import Connected, Dialer, LinkEvent, Listener, Received

Event = LinkEvent[Any]
DEADLINE_S = 60.0
ANY_PORT = "tcp://127.0.0.1:*"
HELLO: bytes = msgpack.packb([limits.PROTOCOL_VERSION, 0, 5, 0, 0, 0, "hello"])


def run_until(
    condition: Callable[[], bool], *links: tuple[Any, list[Event]], deadline_s: float = DEADLINE_S
) -> None:
    """Poll links in turn, collecting their events, until a condition holds."""
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, [events[-5:] for _, events in links]
        for link, events in links:
            events.extend(link.poll(0.005))


def run_for(seconds: float, *links: tuple[Any, list[Event]]) -> None:
    """Poll links in turn, collecting their events, for some time."""
    until_s = time.monotonic() + seconds
    run_until(lambda: time.monotonic() > until_s, *links)


def make_host(folder: Path) -> Keys:
    """Make a key pair in `folder`; nobody but the host itself is allowed there."""
    host_keys.new(folder)
    own = sockets.load_keys(folder)
    assert own is not None
    return own


class Hosts:
    """Four hosts: the head listens, and allows a gateway and a rank; a stranger knows the head."""

    def __init__(self, folder: Path) -> None:
        self.head, self.gateway, self.rank, self.stranger = (
            make_host(folder / name) for name in ("head", "gateway", "rank", "stranger")
        )
        host_keys.allow(self.head.folder, self.gateway.public, "mac-1", ["gateway"])
        host_keys.allow(self.head.folder, self.rank.public, "mac-2", ["rank"])
        for host in (self.gateway, self.rank, self.stranger):
            host_keys.allow(host.folder, self.head.public, "head", ["scheduler"])
        self._links: list[Listener[Any] | Dialer[Any]] = []
        self._sockets: list[zmq.Socket[bytes]] = []

    def listen(self, roles: Sequence[str] = ("gateway", "status")) -> Listener[ToScheduler]:
        """Listen on loopback as the head."""
        link: Listener[ToScheduler] = Listener(
            ANY_PORT, ToScheduler, keys_dir=self.head.folder, roles=roles
        )
        self._links.append(link)
        return link

    def dial(
        self, host: Keys | None, address: str, identity: str = "gateway", clock: Clock | None = None
    ) -> Dialer[ToGateway]:
        """Dial with a host's keys, or with none."""
        folder = host.folder if host else None
        link: Dialer[ToGateway] = Dialer(address, identity, ToGateway, clock, keys_dir=folder)
        self._links.append(link)
        return link

    def dial_raw(self, host: Keys, address: str, identity: bytes) -> "zmq.Socket[bytes]":
        """Dial as a hostile process of a host would: with its key, without sessions."""
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._sockets.append(dealer)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.curve_publickey = host.public.encode()
        dealer.curve_secretkey = host.secret.encode()
        dealer.curve_serverkey = self.head.public.encode()
        dealer.connect(address)
        return dealer

    def thief(
        self, host: Keys, address: str, identity: bytes, frames: list[bytes]
    ) -> Callable[[], None]:
        """Return what sends `frames` under an identity, and every 100 times over a new connection.

        A connection that comes while ZeroMQ still holds another of that identity is never heard.
        """
        calls, dealers = itertools.count(), list[zmq.Socket[bytes]]()

        def send() -> None:
            if next(calls) % 100 == 0:
                dealers.append(self.dial_raw(host, address, identity))
            with contextlib.suppress(zmq.Again):
                dealers[-1].send_multipart(frames, zmq.NOBLOCK)

        return send

    def close(self) -> None:
        """Close what a test has left open."""
        for link in self._links:
            link.close(0.0)
        for one in self._sockets:
            one.close(linger=0)

    def check_health(self, listener: Listener[ToScheduler]) -> None:
        """See that an allowed gateway gets a session and its message through."""
        heard: list[Event] = []
        dialer = self.dial(self.gateway, listener.address)
        connect(listener, dialer)
        dialer.send(AbortRequest(request_id="healthy"))
        run_until(lambda: bool(heard), (listener, heard), (dialer, []))
        dialer.close(0.0)
        assert [e.message.request_id for e in heard if isinstance(e, Received)] == ["healthy"]


def connect(listener: Listener[ToScheduler], dialer: Dialer[ToGateway]) -> PeerId:
    """Bring a session about; return the listener's name for the dialler."""
    heard: list[Event] = []
    run_until(lambda: dialer.is_connected, (listener, heard), (dialer, []))
    return [event.peer for event in heard if isinstance(event, Connected)][-1]
