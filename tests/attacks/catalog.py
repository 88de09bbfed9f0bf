"""All attacks by name. Each runs in a thread until its attacker's time is over."""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Callable

from tests.attacks.attacker import MODEL, Attacker, completion, head, post

BODY_BYTES_MAX = 16 * 1024 * 1024
"""The default of gateway.body_bytes_max."""
CONTEXT_TOKENS = 8_192
"""The demo model's context."""
_LONG_ANSWER = 4_000
_MARGIN_BYTES = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    """One attack."""

    name: str
    run: Callable[[Attacker], None]
    """Attacks with one connection, or one set of connections, until the attacker's time is over."""
    must_depart: bool = False
    """All its clients have left at the end, which the scheduler must know within a second."""


def idle_bodies(attacker: Attacker) -> None:
    """Announce 16 bodies of the largest size, and send nothing of them."""
    with contextlib.ExitStack() as connections:
        for _ in range(16):
            connection = connections.enter_context(attacker.connected())
            connection.sendall(head(BODY_BYTES_MAX))
        attacker.sleep_to_the_end()


def half_bodies(attacker: Attacker) -> None:
    """Send 16 bodies of the largest size up to their last byte, and keep them there."""
    body = _filled(b'{"model":"lockstep-demo","prompt":"', b"x", b'"}')
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        for _ in range(16):
            if attacker.is_over:
                return
            connection = connections.enter_context(attacker.connected())
            connection.sendall(head(len(body)) + body[:-1])
        attacker.sleep_to_the_end()


def long_stop_list(attacker: Attacker) -> None:
    """Finish fifteen bodies of 16 MB with millions of stop strings at the same time."""
    _finish_together(
        attacker, _filled(b'{"model":"lockstep-demo","prompt":"x","stop":["a"', b',"a"', b"]}")
    )


def long_id_lists(attacker: Attacker) -> None:
    """Finish fifteen bodies of 16 MB with millions of token ids at the same time."""
    body = _filled(b'{"model":"lockstep-demo","max_tokens":1,"prompt":[[1', b",1", b"]]}")
    _finish_together(attacker, body)


def many_objects(attacker: Attacker) -> None:
    """Finish fifteen bodies of 16 MB with millions of empty objects at the same time."""
    body = _filled(b'{"model":"lockstep-demo","messages":[{}', b",{}", b"]}")
    _finish_together(attacker, body, path="/v1/chat/completions")


def escaped_text(attacker: Attacker) -> None:
    """Send 16 MB of escape sequences as a prompt, again and again."""
    body = _filled(b'{"model":"lockstep-demo","max_tokens":1,"prompt":"', b"\\u00e9", b'"}')
    _repeat(attacker, post(body))


def many_long_prompts(attacker: Attacker) -> None:
    """Send 24 prompts of 650,000 characters in one request, again and again."""
    prompts = ["word " * 130_000] * 24
    _repeat(attacker, post(completion(prompt=prompts, max_tokens=1)))


def longest_prompts(attacker: Attacker) -> None:
    """Send 64 prompts that just fit the context, again and again."""
    prompts = ["word " * 1_500] * 64
    _repeat(attacker, post(completion(prompt=prompts, max_tokens=1)))


def deep_arguments(attacker: Attacker) -> None:
    """Send a special token beside tool-call arguments that are nested 500 deep."""
    arguments = '{"a":' + "[" * 500 + "]" * 500 + "}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "<|im_end|> hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    _repeat(attacker, post(body, "/v1/chat/completions"))


def whole_logprobs(attacker: Attacker) -> None:
    """Ask for eight long completions with 20 alternatives per token, in one body."""
    messages = [{"role": "user", "content": "Tell a long story."}]
    body = {
        "model": MODEL,
        "messages": messages,
        "n": 8,
        "max_tokens": _LONG_ANSWER,
        "logprobs": True,
        "top_logprobs": 20,
        "logit_bias": {"2041": -100, "2043": -100},
    }
    _repeat(attacker, post(body, "/v1/chat/completions"))


def long_id_prompts(attacker: Attacker) -> None:
    """Send 64 prompts of 8,100 token ids with two completions each, again and again."""
    ids = [1_000 + index % 1_000 for index in range(8_100)]
    body = completion(prompt=[ids] * 64, n=2, max_tokens=16, stream=True)
    _repeat(attacker, post(body))


def many_requests(attacker: Attacker) -> None:
    """Keep 50 streams of long completions open."""
    body = completion(stream=True, max_tokens=_LONG_ANSWER, logit_bias={"2041": -100, "2043": -100})
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        opened = []
        for _ in range(50):
            opened.append(connections.enter_context(attacker.connected()))
            opened[-1].sendall(post(body))
        for connection in opened:
            connection.setblocking(False)
        while not attacker.is_over:
            for connection in opened:
                with contextlib.suppress(BlockingIOError):
                    connection.recv(1 << 16)
            time.sleep(0.02)


def pipelining(attacker: Attacker) -> None:
    """Send 40 further requests behind a long one, and leave."""
    further = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 40
    _leave(attacker, post(completion(max_tokens=_LONG_ANSWER), headers="") + further)


def upgrades(attacker: Attacker) -> None:
    """Ask for another protocol with a long request, send junk, and leave."""
    headers = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    request = post(completion(max_tokens=_LONG_ANSWER), headers=headers)
    _leave(attacker, request + b"\x81\x05junk!" * 10_000)


def half_closes(attacker: Attacker) -> None:
    """Close the sending side after a long request, and leave a moment later."""
    while not attacker.is_over:
        with contextlib.suppress(OSError), attacker.connected() as connection:
            connection.sendall(post(completion(max_tokens=_LONG_ANSWER)))
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
        time.sleep(0.2)


def old_versions(attacker: Attacker) -> None:
    """Ask over HTTP/1.0 for long streams and answers in turn, and leave a moment later."""
    is_streamed = False
    while not attacker.is_over:
        is_streamed = not is_streamed
        body = completion(max_tokens=_LONG_ANSWER, stream=is_streamed)
        headers = "Connection: keep-alive\r\n"
        with contextlib.suppress(OSError), attacker.connected() as connection:
            connection.sendall(post(body, version="1.0", headers=headers))
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
        time.sleep(0.2)


def slow_readers(attacker: Attacker) -> None:
    """Keep 16 streams of long completions open and read none of them."""
    body = completion(stream=True, max_tokens=_LONG_ANSWER, n=4)
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        for _ in range(16):
            connection = connections.enter_context(attacker.connected())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            connection.sendall(post(body))
        attacker.sleep_to_the_end()


def idle_connections(attacker: Attacker) -> None:
    """Open 500 connections and send half of a header on each."""
    with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
        for _ in range(500):
            connection = connections.enter_context(attacker.connected())
            connection.sendall(b"POST /v1/completions HT")
        attacker.sleep_to_the_end()


def wrong_keys(attacker: Attacker) -> None:
    """Send requests with a wrong API key as fast as possible."""
    request = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer x\r\n\r\n"
    _repeat(attacker, request)


def _filled(start: bytes, part: bytes, end: bytes) -> bytes:
    """Return a body just below the largest size, which repeats `part` between start and end."""
    room = BODY_BYTES_MAX - _MARGIN_BYTES - len(start) - len(end)
    body = start + part * (room // len(part)) + end
    json.loads(body[: len(start)] + end)  # the pieces fit together
    return body


def _finish_together(attacker: Attacker, body: bytes, path: str = "/v1/completions") -> None:
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
                    connection.recv(1_000)


def _repeat(attacker: Attacker, request: bytes) -> None:
    while not attacker.is_over:
        attacker.exchange(request)


def _leave(attacker: Attacker, request: bytes) -> None:
    """Send a request and close the connection a moment later, again and again."""
    while not attacker.is_over:
        with contextlib.suppress(OSError), attacker.connected() as connection:
            connection.sendall(request)
            time.sleep(0.3)
        time.sleep(0.2)


ATTACKS = [
    Attack("idle-bodies", idle_bodies),
    Attack("half-bodies", half_bodies),
    Attack("long-stop-list", long_stop_list),
    Attack("long-id-lists", long_id_lists),
    Attack("many-objects", many_objects),
    Attack("escaped-text", escaped_text),
    Attack("many-long-prompts", many_long_prompts),
    Attack("longest-prompts", longest_prompts, must_depart=True),
    Attack("deep-arguments", deep_arguments),
    Attack("whole-logprobs", whole_logprobs, must_depart=True),
    Attack("long-id-prompts", long_id_prompts, must_depart=True),
    Attack("many-requests", many_requests, must_depart=True),
    Attack("pipelining", pipelining, must_depart=True),
    Attack("upgrades", upgrades, must_depart=True),
    Attack("half-closes", half_closes, must_depart=True),
    Attack("old-versions", old_versions, must_depart=True),
    Attack("slow-readers", slow_readers, must_depart=True),
    Attack("idle-connections", idle_connections),
    Attack("wrong-keys", wrong_keys),
]
