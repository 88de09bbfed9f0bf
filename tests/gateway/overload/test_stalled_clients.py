"""F18: a client that stops reading in a stream is cut off in time, even with little data."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import generated, ready_status, reply_with

_TOKENIZER = tiny_tokenizer.train()
_TOKENS: list[int] = _TOKENIZER.encode("one two three " * 100).ids
_STALLED_S = 2.0
_STALL = f"import services.gateway.http.connection_limits as c; c.STALL_TIMEOUT_S = {_STALLED_S}"
# Trio, which the gateway's libraries import where it is installed, copies the names of `socket`.
_NO_KERNEL_TIMEOUT = "import socket, trio.socket; vars(socket).pop('TCP_USER_TIMEOUT', None)"
_SLOW_S = 6.0
"""Stall timeout in seconds, longer than a pause of this process on a busy test machine."""
_REPORT = ready_status(context_tokens_max=1_000_000)


def _reply(first_tokens: int) -> Any:
    """Return a reply with many tokens at once, and then ten per second without an end."""

    def reply(request: Any) -> Iterator[Any]:
        for position in range(0, first_tokens, 20):
            yield generated(request, position, _TOKENS[:20])
            yield 0.002
        for position in range(first_tokens, 100_000):
            yield generated(request, position, _TOKENS[:1])
            yield 0.1

    return reply


def _connect(gateway: RunningGateway) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.settimeout(30.0)
    client.connect(("127.0.0.1", gateway.port))
    body = {"stream": True, "max_tokens": 900_000, "logprobs": True, "top_logprobs": 5}
    client.sendall(raw_client.encode_request(body))
    assert client.recv(1_024).startswith(b"HTTP/1.1 200 ")
    return client


_MECHANISMS = {
    "gateway sees no progress": (
        f"{_NO_KERNEL_TIMEOUT}; {_STALL}",
        2_000,
    )
}
if hasattr(socket, "TCP_USER_TIMEOUT"):
    # Only Linux has this option.
    _MECHANISMS["kernel sees a closed window"] = _STALL, 200


@pytest.mark.proof
@pytest.mark.parametrize(
    ("prelude", "first_tokens"),
    _MECHANISMS.values(),
    ids=_MECHANISMS.keys(),
)
def test_request_is_aborted_when_client_stops_reading_stream_until_timeout(
    model_folder: Path, tmp_path: Path, prelude: str, first_tokens: int
) -> None:
    """After the stall timeout the client's sequence is aborted, and other requests are served."""
    settings: dict[str, Any] = {"stream_buffer_bytes_max": 2**26, "keepalive_s": 0.5}
    settings |= {"prelude": prelude, "report": _REPORT}
    with RunningGateway.start(model_folder, tmp_path, **settings) as gateway:
        gateway.scheduler.reply = _reply(first_tokens)
        start_s = time.monotonic()
        with _connect(gateway):
            aborts = gateway.scheduler.wait_aborts(1, 30.0)
            assert len(aborts) == 1
            assert time.monotonic() - start_s > _STALLED_S / 2
        gateway.scheduler.reply = reply_with(_TOKENS[:5])
        assert gateway.chat()[0] == 200
        assert b"lockstep_gateway_open_requests 0.0" in gateway.get("/metrics")[1]


@pytest.mark.proof
def test_request_continues_when_client_reads_stream_slowly(
    model_folder: Path, tmp_path: Path
) -> None:
    """A client that reads a little at a time is not stalled."""
    prelude = (
        f"{_NO_KERNEL_TIMEOUT}; import services.gateway.http.connection_limits as c; "
        f"c.STALL_TIMEOUT_S = {_SLOW_S}"
    )
    settings: dict[str, Any] = {"stream_buffer_bytes_max": 2**26, "keepalive_s": 0.5}
    settings |= {"prelude": prelude, "report": _REPORT}
    with RunningGateway.start(model_folder, tmp_path, **settings) as gateway:
        gateway.scheduler.reply = _reply(2_000)
        with _connect(gateway) as client:
            until_s = time.monotonic() + 2 * _SLOW_S
            while time.monotonic() < until_s:
                assert client.recv(32_768)
                time.sleep(0.1)
            assert gateway.scheduler.aborts == []
