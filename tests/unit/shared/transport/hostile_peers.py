"""Both ends of a link as a stranger plays them, with raw sockets, and a good pair beside them."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, get_args

import msgpack
import zmq

from shared import limits
from shared.messages import AbortRequest, QueryStore, RequestFinished, ToGateway, ToStore
from shared.transport import delivery, framing
from shared.transport.links import Dialer, Listener, Received


class HostileDialer:
    """A raw DEALER that knows the protocol, and holds a session of its own."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, os.urandom(5) + b"\xff\x00")
        self._socket.connect(address)
        self.own = 77
        self.peer = 0
        self.number = 0

    def hello(self) -> None:
        """Ask for a session."""
        self.send([self.header(receiver=0, number=0, kind=delivery.HELLO)])

    def take_welcome(self) -> bool:
        """Learn the listener's incarnation; False when it has said nothing yet."""
        if not self._socket.poll(0):
            return False
        self.peer = framing.unpack(self._socket.recv_multipart()).sender
        return True

    def header(self, **changes: Any) -> bytes:
        """Return the header of the next message, with changes."""
        fields = {
            "version": limits.PROTOCOL_VERSION, "epoch": 0, "sender": self.own,
            "receiver": self.peer, "number": self.number + 1, "acknowledged": 0,
            "kind": delivery.MESSAGE, **changes,
        }  # fmt: skip
        packed: bytes = msgpack.packb(list(fields.values()))
        return packed

    def send(self, parts: list[bytes]) -> None:
        """Send parts as they are."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(parts, zmq.NOBLOCK)

    def send_body(self, body: bytes) -> None:
        """Send a body as the next message of the session."""
        self.send([self.header(), body])
        self.number += 1

    def close(self) -> None:
        """Go."""
        self._socket.close(0)


class HostileListener:
    """A raw ROUTER in the place of a listener, which may send anything to who dials."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self.own = 99
        self.dialer = b""
        self.dialer_incarnation = 0
        self.number = 0

    def meet(self) -> None:
        """Take frames: the latest says who dials now."""
        while self._socket.poll(0):
            identity, *parts = self._socket.recv_multipart()
            self.dialer, self.dialer_incarnation = identity, framing.unpack(parts).sender

    def send(self, kind: str, body: bytes = b"", **changes: Any) -> None:
        """Send a frame to the dialler, with changes."""
        fields = {
            "version": limits.PROTOCOL_VERSION, "epoch": 0, "sender": self.own,
            "receiver": self.dialer_incarnation, "number": 0, "acknowledged": 0, "kind": kind,
            **changes,
        }  # fmt: skip
        header = msgpack.packb(list(fields.values()))
        self._socket.send_multipart([self.dialer, header, body] if body else [self.dialer, header])

    def send_raw(self, parts: list[bytes]) -> None:
        """Send parts as they are."""
        self._socket.send_multipart([self.dialer, *parts])

    def close(self) -> None:
        """Go."""
        self._socket.close(0)


class WellBehavedLink:
    """A listener and a good peer that gets an answer to everything, whoever else is there."""

    def __init__(self, address: str, union: Any) -> None:
        self.union = union
        self.listener: Listener[Any] = Listener(address, union)
        self.dialer: Dialer[Any] = Dialer(address, "good", ToGateway)
        self._count = 0
        self._run(lambda: self.dialer.is_connected)

    def check(self) -> None:
        """Send three orders, have each answered, in order and once."""
        order = QueryStore() if self.union is ToStore else None
        expected = [f"r{self._count + n}" for n in range(3)]
        self._count += 3
        heard: list[str] = []
        for name in expected:
            self.dialer.send(order or AbortRequest(request_id=name))
        answers = iter(expected)
        until_s = time.monotonic() + 10.0
        while len(heard) < 3:
            assert time.monotonic() < until_s, "the good peer is not served"
            self._answer(answers)
            events = self.dialer.poll(0.0)
            heard += [e.message.request_id for e in events if isinstance(e, Received)]
        assert heard == expected

    def poll(self) -> None:
        """Let the listener take what is there."""
        for _ in range(5):
            self.listener.poll(0.002)

    def _answer(self, names: Iterator[str]) -> None:
        for event in self.listener.poll(0.002):
            if isinstance(event, Received):
                assert isinstance(event.message, get_args(self.union))
                if event.peer.startswith(b"good"):
                    end = RequestFinished(
                        request_id=next(names), finish_reason="stop",
                        prompt_tokens=1, completion_tokens=1,
                    )  # fmt: skip
                    self.listener.send(event.peer, end)

    def _run(self, holds: Any) -> None:
        until_s = time.monotonic() + 10.0
        while not holds():
            assert time.monotonic() < until_s
            self.listener.poll(0.002)
            self.dialer.poll(0.002)

    def close(self) -> None:
        """Close both ends."""
        self.dialer.close(0.0)
        self.listener.close(0.0)
