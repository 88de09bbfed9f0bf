"""Attacks on connections: clients that wait, leave, do not read, or speak HTTP badly."""

import contextlib
import socket
import time

from tests.attacks.attack import LONG_ANSWER, NO_END, Attack, keep_open, leave, repeat
from tests.attacks.attacker import Attacker, completion, post


def idle_connections(attacker: Attacker) -> None:
    """Open 500 connections and send half of a header on each."""
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        for _ in range(500):
            connection = connections.enter_context(attacker.connected())
            connection.sendall(b"POST /v1/completions HT")
        attacker.sleep_to_the_end()


def pipelining(attacker: Attacker) -> None:
    """Send 40 further requests behind a long one, and leave."""
    further = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 40
    leave(attacker, post(completion(max_tokens=LONG_ANSWER), headers="") + further)


def upgrades(attacker: Attacker) -> None:
    """Ask for another protocol with a long request, send junk, and leave."""
    headers = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    request = post(completion(max_tokens=LONG_ANSWER), headers=headers)
    leave(attacker, request + b"\x81\x05junk!" * 10_000)


def half_closes(attacker: Attacker) -> None:
    """Close the sending side after a long request, and leave a moment later."""
    while not attacker.is_over:
        with contextlib.suppress(OSError), attacker.connected() as connection:
            connection.sendall(post(completion(max_tokens=LONG_ANSWER)))
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
        time.sleep(0.2)


def old_versions(attacker: Attacker) -> None:
    """Ask over HTTP/1.0 for long streams and answers in turn, and leave a moment later."""
    is_streamed = False
    while not attacker.is_over:
        is_streamed = not is_streamed
        body = completion(max_tokens=LONG_ANSWER, stream=is_streamed)
        headers = "Connection: keep-alive\r\n"
        with contextlib.suppress(OSError), attacker.connected() as connection:
            connection.sendall(post(body, version="1.0", headers=headers))
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
        time.sleep(0.2)


def many_requests(attacker: Attacker) -> None:
    """Keep 50 streams of long completions open."""
    body = completion(stream=True, max_tokens=LONG_ANSWER, logit_bias=NO_END)
    keep_open(attacker, [post(body)] * 50)


def slow_readers(attacker: Attacker) -> None:
    """Keep 16 streams of long completions open and read none of them."""
    body = completion(stream=True, max_tokens=LONG_ANSWER, n=4)
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        for _ in range(16):
            connection = connections.enter_context(attacker.connected())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.sendall(post(body))
        attacker.sleep_to_the_end()


def wrong_keys(attacker: Attacker) -> None:
    """Send requests with a wrong API key as fast as possible."""
    request = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer x\r\n\r\n"
    repeat(attacker, request)


ATTACKS = [
    Attack("idle-connections", idle_connections),
    Attack("pipelining", pipelining, must_depart=True),
    Attack("upgrades", upgrades, must_depart=True),
    Attack("half-closes", half_closes, must_depart=True),
    Attack("old-versions", old_versions, must_depart=True),
    Attack("many-requests", many_requests, must_depart=True),
    Attack("slow-readers", slow_readers, must_depart=True),
    Attack("wrong-keys", wrong_keys),
]
