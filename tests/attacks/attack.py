"""What an attack is, and the ways of sending requests that attacks have in common."""

import contextlib
import dataclasses
import itertools
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.attacks.attacker import Attacker, head, post

BODY_BYTES_MAX = 16 * 1024 * 1024
"""The default of gateway.body_bytes_max."""
LONG_ANSWER = 4_000
"""Tokens of an answer that takes longer than an attack."""
NO_END = {"2041": -100, "2043": -100}
"""Bias of the demo model's tokens that end an answer."""
_MARGIN_BYTES = 200
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    """One attack."""

    name: str
    run: Callable[[Attacker], None]
    """Attacks with one connection, or one set of connections, until the attacker's time is over."""
    must_depart: bool = False
    """All its clients have left at the end, which the scheduler must know within a second."""
    status: int = 0
    """Status of at least one answer, without which the attack has not reached its aim; 0: any."""
    request_more_s: float = float("inf")
    """Most by which it may lengthen the victim's longest request of each kind."""


def filled(start: bytes, part: bytes, end: bytes) -> bytes:
    """Return a body just below the largest size, which repeats `part` between start and end."""
    room = BODY_BYTES_MAX - _MARGIN_BYTES - len(start) - len(end)
    body = start + part * (room // len(part)) + end
    json.loads(body[: len(start)] + end)  # the pieces fit together
    return body


def finish_together(attacker: Attacker, body: bytes, path: str = "/v1/completions") -> None:
    """Send fifteen requests up to their last byte, then all last bytes, again and again."""
    request = head(len(body), path, headers="Connection: close\r\n") + body
    while not attacker.is_over:
        with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
            opened = [connections.enter_context(attacker.connected()) for _ in range(15)]
            for connection in opened:
                connection.sendall(request[:-1])
            for connection in opened:
                with contextlib.suppress(OSError):
                    connection.sendall(request[-1:])
            for connection in opened:
                connection.settimeout(attacker.left_s)
                with contextlib.suppress(OSError):
                    attacker.note(connection.recv(1_000))


def repeat(attacker: Attacker, *requests: bytes) -> None:
    """Send one request after another, and begin again."""
    for request in itertools.cycle(requests):
        if attacker.is_over:
            return
        attacker.exchange(request)


def repeat_new(attacker: Attacker, make: Callable[[int], Sequence[bytes]]) -> None:
    """Send new requests at the same time, wait for all answers, and begin again.

    Args:
        attacker: the attacker.
        make: returns the requests by a number (`new_number`).
    """
    while not attacker.is_over:
        attacker.exchange_all(make(new_number()))


def new_number() -> int:
    """Return a number that is never returned again; it makes a request new to every cache."""
    return next(_numbers)


def keep_open(attacker: Attacker, requests: Sequence[bytes]) -> None:
    """Send requests, and read their answers until the attacker's time is over."""
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        opened: list[socket.socket] = []
        unanswered: set[socket.socket] = set()
        for request in requests:
            if attacker.is_over:
                return
            connection = connections.enter_context(attacker.connected())
            connection.settimeout(attacker.left_s)
            # One that is refused must not end the others.
            with contextlib.suppress(OSError):
                connection.sendall(request)
            connection.setblocking(False)
            opened.append(connection)
            unanswered.add(connection)
            _read_available(attacker, opened, unanswered)
        while not attacker.is_over:
            _read_available(attacker, opened, unanswered)
            time.sleep(0.02)


def _read_available(
    attacker: Attacker, opened: Sequence[socket.socket], unanswered: set[socket.socket]
) -> None:
    """Read the bytes that have arrived; note the status of each answer that begins."""
    for connection in opened:
        with contextlib.suppress(OSError):
            received = connection.recv(1 << 16)
            if connection in unanswered:
                unanswered.remove(connection)
                attacker.note(received)


def leave(attacker: Attacker, request: bytes) -> None:
    """Send a request and close the connection a moment later, again and again."""
    while not attacker.is_over:
        with contextlib.suppress(OSError), attacker.connected() as connection:
            connection.sendall(request)
            time.sleep(0.3)
        time.sleep(0.2)


def ask(attacker: Attacker, body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the JSON object of an answer; {} if none came."""
    content = attacker.exchange(post(body, path)).partition(b"\r\n\r\n")[2]
    with contextlib.suppress(json.JSONDecodeError):
        answer: dict[str, Any] = json.loads(content)
        return answer
    return {}
