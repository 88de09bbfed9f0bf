"""Hostile peers with raw sockets at either end of a link, and a well-behaved link beside them."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, get_args

import msgpack
import zmq

from shared import limits
from shared.messages import AbortRequest, QueryStore, RequestFinished, ToGateway, ToStore
from shared.transport import delivery, framing
from shared.transport.links import Dialer, Listener, Received
from tests.support.waiting import wait_until
from tests.unit.shared.transport.link_polling import poll_until


class HostileDialer:
    """A raw DEALER that knows the protocol and has a session."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, os.urandom(5) + b"\xff\x00")
        self._socket.connect(address)
        self.incarnation = 77
        self.listener_incarnation = 0
        self.number = 0

    def hello(self) -> None:
        """Ask for a session."""
        self.send([self.header(receiver=0, number=0, kind=delivery.HELLO)])

    def take_welcome(self) -> bool:
        """Read the listener's incarnation from its welcome; return False if none has arrived."""
        if not self._socket.poll(0):
            return False
        self.listener_incarnation = framing.unpack(self._socket.recv_multipart()).sender
        return True

    def header(self, **changes: Any) -> bytes:
        """Return the header of the next message, with changes."""
        fields = {
            "version": limits.PROTOCOL_VERSION, "epoch": 0, "sender": self.incarnation,
            "receiver": self.listener_incarnation, "number": self.number + 1, "acknowledged": 0,
            "kind": delivery.MESSAGE, **changes,
        }  # fmt: skip
        packed: bytes = msgpack.packb(list(fields.values()))
        return packed

    def send(self, parts: list[bytes]) -> None:
        """Send parts unchanged."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(parts, zmq.NOBLOCK)

    def send_body(self, body: bytes) -> None:
        """Send a body as the next message of the session."""
        self.send([self.header(), body])
        self.number += 1

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)


class HostileListener:
    """A raw ROUTER in place of a listener, which sends anything to its dialler."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self.incarnation = 99
        self.dialer = b""
        self.dialer_incarnation = 0
        self.number = 0

    def read_dialer(self) -> None:
        """Take frames: the latest says who dials now."""
        while self._socket.poll(0):
            identity, *parts = self._socket.recv_multipart()
            self.dialer, self.dialer_incarnation = identity, framing.unpack(parts).sender

    def send(self, kind: str, body: bytes = b"", **changes: Any) -> None:
        """Send a frame to the dialler, with changes of its header."""
        fields = {
            "version": limits.PROTOCOL_VERSION, "epoch": 0, "sender": self.incarnation,
            "receiver": self.dialer_incarnation, "number": 0, "acknowledged": 0, "kind": kind,
            **changes,
        }  # fmt: skip
        header = msgpack.packb(list(fields.values()))
        self._socket.send_multipart([self.dialer, header, body] if body else [self.dialer, header])

    def send_raw(self, parts: list[bytes]) -> None:
        """Send parts unchanged."""
        self._socket.send_multipart([self.dialer, *parts])

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(0)


class WellBehavedLink:
    """A listener and a dialler that expects an answer to each message it sends."""

    def __init__(self, address: str, union: Any) -> None:
        self.union = union
        self.listener: Listener[Any] = Listener(address, union)
        self.dialer: Dialer[Any] = Dialer(address, "good", ToGateway)
        self._count = 0
        poll_until(
            lambda: self.dialer.is_connected,
            (self.listener, []),
            (self.dialer, []),
            deadline_s=10.0,
        )

    def check(self) -> None:
        """Send three messages and check that each is answered once and in order."""
        query = QueryStore() if self.union is ToStore else None
        expected = [f"r{self._count + n}" for n in range(3)]
        self._count += 3
        answered: list[str] = []
        for name in expected:
            self.dialer.send(query or AbortRequest(request_id=name))
        answers = iter(expected)

        def all_answered() -> bool:
            self._answer(answers)
            events = self.dialer.poll(0.0)
            answered.extend(e.message.request_id for e in events if isinstance(e, Received))
            return len(answered) >= 3

        wait_until(all_answered, 10.0, poll_s=0.0, failure="the well-behaved peer is not served")
        assert answered == expected

    def poll(self) -> None:
        """Let the listener process the frames that have arrived."""
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

    def close(self) -> None:
        """Close both ends."""
        self.dialer.close(0.0)
        self.listener.close(0.0)
