"""Shares of tenants: requests of one API key never keep those of another key out."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.configuration.loading import API_KEYS_VARIABLE
from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import reply_after, reply_with
from tests.support.waiting import wait_until

_TOKENS: list[int] = tiny_tokenizer.train().encode("one two three " * 10).ids[:10]
_ALICE = "the-key-of-alice-for-this-test"
_BOB = "the-key-of-bob-for-this-test"
_BODY_BYTES_MAX = 16 * 1024 * 1024
_PLACES = 8


@pytest.fixture(scope="module")
def gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway for few requests, and with memory for two bodies of the largest size."""
    prelude = (
        "import services.gateway.http.admission as a; "
        f"a.BODIES_BYTES_MAX = {2 * _BODY_BYTES_MAX}; a.FullQueue.error = lambda *_: None"
    )
    environment = {API_KEYS_VARIABLE: f"alice={_ALICE},bob={_BOB}"}
    run_dir = tmp_path_factory.mktemp("tenants")
    settings: dict[str, Any] = {"environment": environment, "open_requests_max": _PLACES}
    with RunningGateway.start(model_folder, run_dir, prelude=prelude, **settings) as running:
        yield running


def _chat(gateway: RunningGateway, key: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "tiny", "messages": raw_client.MESSAGES, **fields}
    return gateway.post(raw_client.CHAT, body, {"Authorization": f"Bearer {key}"})[:2]


def _open(gateway: RunningGateway, content_bytes: int, data: bytes) -> socket.socket:
    """Send the headers of a request of alice, and the beginning of its body."""
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.settimeout(10.0)
    client.sendall(
        f"POST {raw_client.CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {_ALICE}\r\nContent-Length: {content_bytes}\r\n\r\n".encode()
    )
    client.sendall(data)
    return client


def test_announced_bodies_of_which_nothing_arrives_take_no_memory(gateway: RunningGateway) -> None:
    """Only bytes that have arrived count, also for the tenant that announces them."""
    gateway.scheduler.reply = reply_with(_TOKENS)
    with contextlib.ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(_open(gateway, _BODY_BYTES_MAX, b""))
        for key in (_ALICE, _BOB):
            assert _chat(gateway, key)[0] == 200


def test_arrived_bodies_of_one_tenant_leave_memory_for_another(gateway: RunningGateway) -> None:
    """Bodies up to their last byte fill the tenant's own share; the sentence says whose it is."""
    gateway.scheduler.reply = reply_with(_TOKENS)
    data = b'{"model":"tiny","messages":[]' + b" " * (_BODY_BYTES_MAX - 100)
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(_open(gateway, _BODY_BYTES_MAX, data))]
        refused = opened.enter_context(_open(gateway, _BODY_BYTES_MAX, b""))
        with contextlib.suppress(OSError):
            refused.sendall(data)
        response = refused.recv(65_536)
        assert response.startswith(b"HTTP/1.1 429 ")
        assert b"your share" in response
        assert b"\r\nRetry-After: 1\r\n" in response
        body = {"model": "tiny", "messages": raw_client.MESSAGES}
        large = json.dumps(body).encode() + b" " * 4 * 2**20
        headers = {"Authorization": f"Bearer {_BOB}"}
        assert gateway.post(raw_client.CHAT, large, headers)[0] == 200
        assert clients


def test_open_requests_of_one_tenant_leave_places_for_another(gateway: RunningGateway) -> None:
    """One key gets a 429 above its share; the other one is served at once."""
    release = threading.Event()
    gateway.scheduler.reset()
    gateway.scheduler.reply = reply_after(_TOKENS, release)
    body = json.dumps({"model": "tiny", "messages": raw_client.MESSAGES, "stream": True}).encode()
    with contextlib.ExitStack() as opened:
        count = _PLACES * 3 // 4
        clients = [opened.enter_context(_open(gateway, len(body), body)) for _ in range(count)]
        wait_until(lambda: len(gateway.scheduler.submitted) == count)
        status, error = _chat(gateway, _ALICE)
        assert (status, error["error"]["code"]) == (429, "queue_full")
        assert "your share" in error["error"]["message"]
        gateway.scheduler.reply = reply_with(_TOKENS)
        assert _chat(gateway, _BOB)[0] == 200
        assert _chat(gateway, _BOB, n=_PLACES)[0] == 429
        release.set()
        for client in clients:
            received = b""
            while b"data: [DONE]" not in received:
                received += client.recv(65_536)
