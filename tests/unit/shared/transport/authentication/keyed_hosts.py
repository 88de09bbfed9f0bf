"""Hosts with keys that allow each other, and links between them over loopback."""

import contextlib
import itertools
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
from shared.transport.links import Connected, Dialer, Listener, Received
from tests.unit.shared.transport.link_polling import Event, poll_until

ANY_PORT = "tcp://127.0.0.1:*"
HELLO: bytes = msgpack.packb([limits.PROTOCOL_VERSION, 0, 5, 0, 0, 0, "hello"])


def make_host(folder: Path) -> Keys:
    """Create a key pair in `folder`, whose host allows only itself."""
    host_keys.new(folder)
    own = sockets.load_keys(folder)
    assert own is not None
    return own


class Hosts:
    """Four hosts: the scheduler's host allows a gateway and a rank; an unknown host allows the
    scheduler."""

    def __init__(self, folder: Path) -> None:
        self.scheduler, self.gateway, self.rank, self.unknown = (
            make_host(folder / name) for name in ("scheduler", "gateway", "rank", "unknown")
        )
        host_keys.allow(self.scheduler.folder, self.gateway.public, "mac-1", ["gateway"])
        host_keys.allow(self.scheduler.folder, self.rank.public, "mac-2", ["rank"])
        for host in (self.gateway, self.rank, self.unknown):
            host_keys.allow(host.folder, self.scheduler.public, "scheduler-host", ["scheduler"])
        self._links: list[Listener[Any] | Dialer[Any]] = []
        self._sockets: list[zmq.Socket[bytes]] = []

    def listen(self, roles: Sequence[str] = ("gateway", "status")) -> Listener[ToScheduler]:
        """Listen on loopback with the keys of the scheduler's host."""
        link: Listener[ToScheduler] = Listener(
            ANY_PORT, ToScheduler, keys_dir=self.scheduler.folder, roles=roles
        )
        self._links.append(link)
        return link

    def dial(
        self, host: Keys | None, address: str, identity: str = "gateway", clock: Clock | None = None
    ) -> Dialer[ToGateway]:
        """Dial with a host's keys, or without keys."""
        folder = host.folder if host else None
        link: Dialer[ToGateway] = Dialer(address, identity, ToGateway, clock, keys_dir=folder)
        self._links.append(link)
        return link

    def dial_raw(self, host: Keys, address: str, identity: bytes) -> "zmq.Socket[bytes]":
        """Dial with a raw socket and a host's key, as a hostile process of that host would."""
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._sockets.append(dealer)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.curve_publickey = host.public.encode()
        dealer.curve_secretkey = host.secret.encode()
        dealer.curve_serverkey = self.scheduler.public.encode()
        dealer.connect(address)
        return dealer

    def identity_thief(
        self, host: Keys, address: str, identity: bytes, frames: list[bytes]
    ) -> Callable[[], None]:
        """Return a function that sends `frames` under the identity of another peer.

        Every 100th call opens a new connection, because ZeroMQ ignores a connection while it still
        holds another one with the same identity.
        """
        calls, dealers = itertools.count(), list[zmq.Socket[bytes]]()

        def send() -> None:
            if next(calls) % 100 == 0:
                dealers.append(self.dial_raw(host, address, identity))
            with contextlib.suppress(zmq.Again):
                dealers[-1].send_multipart(frames, zmq.NOBLOCK)

        return send

    def close(self) -> None:
        """Close all links and sockets that are still open."""
        for link in self._links:
            link.close(0.0)
        for socket in self._sockets:
            socket.close(linger=0)

    def check_health(self, listener: Listener[ToScheduler]) -> None:
        """Check that an allowed gateway gets a session and that its message arrives."""
        heard: list[Event] = []
        dialer = self.dial(self.gateway, listener.address)
        connect(listener, dialer)
        dialer.send(AbortRequest(request_id="healthy"))
        poll_until(lambda: bool(heard), (listener, heard), (dialer, []))
        dialer.close(0.0)
        assert [e.message.request_id for e in heard if isinstance(e, Received)] == ["healthy"]


def connect(listener: Listener[ToScheduler], dialer: Dialer[ToGateway]) -> PeerId:
    """Establish a session; return the listener's id of the dialler."""
    heard: list[Event] = []
    poll_until(lambda: dialer.is_connected, (listener, heard), (dialer, []))
    return [event.peer for event in heard if isinstance(event, Connected)][-1]
