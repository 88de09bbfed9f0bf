"""Waiting for what is measured: until it is ready, has ended, or says that it never will be."""

import functools
import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.commands.bench.measuring.processes import MeasuredProcess, wait_until_ready
from services.commands.bench.measuring.stack import STATUS_PATH, failure_reason
from shared.errors import UnavailableError
from tests.serving import serving

_WAIT_S = 60.0


class _Gateway(http.server.ThreadingHTTPServer):
    """Says what a gateway says of a world."""

    daemon_threads = True

    def __init__(self) -> None:
        self.is_ready = False
        self.failure = ""
        self.scheduler_reports = True
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def port(self) -> int:
        return self.server_address[1]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        gateway = self.server
        assert isinstance(gateway, _Gateway)
        world = {"failure": gateway.failure, "reason": "rank 1 has no memory"}
        status = {"scheduler": world if gateway.scheduler_reports else None}
        body = json.dumps(status if self.path == STATUS_PATH else {}).encode()
        self.send_response(200 if gateway.is_ready or self.path == STATUS_PATH else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def gateway() -> Iterator[_Gateway]:
    """A server on loopback."""
    running = _Gateway()
    with serving(running):
        yield running


def _child(folder: Path, code: str) -> MeasuredProcess:
    return MeasuredProcess("the stack", [sys.executable, "-c", code], folder / "log")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[MeasuredProcess]:
    """A process that does not end by itself."""
    one = _child(tmp_path, "print('a last word', flush=True); import time; time.sleep(600)")
    yield one
    one.stop()


def test_what_is_ready_is_not_waited_for(gateway: _Gateway, child: MeasuredProcess) -> None:
    """Neither an empty failure nor a scheduler that says nothing yet is a reason to give up."""
    given_up = functools.partial(failure_reason, gateway.port)
    threading.Timer(0.3, lambda: setattr(gateway, "scheduler_reports", True)).start()
    threading.Timer(0.6, lambda: setattr(gateway, "is_ready", True)).start()
    gateway.scheduler_reports = False

    wait_until_ready(child, gateway.port, "/readyz", _WAIT_S, given_up)

    assert gateway.is_ready


def test_a_world_that_has_given_up_is_not_waited_for(
    gateway: _Gateway, child: MeasuredProcess
) -> None:
    """The benchmark ends with the cause and the log, not after a quarter of an hour."""
    gateway.failure = "epochs"
    given_up = functools.partial(failure_reason, gateway.port)
    began_s = time.monotonic()

    with pytest.raises(UnavailableError, match=r"never be ready \(rank 1 has no memory\)") as error:
        wait_until_ready(child, gateway.port, "/readyz", _WAIT_S, given_up)

    assert time.monotonic() - began_s < _WAIT_S
    assert "The end of its log" in str(error.value)


def test_a_process_that_has_ended_is_not_waited_for(gateway: _Gateway, tmp_path: Path) -> None:
    """Its exit code and its last words are the message."""
    ended = _child(tmp_path, "import sys; print('no such model'); sys.exit(78)")
    try:
        with pytest.raises(UnavailableError, match=r"(?s)exit code 78.*no such model"):
            wait_until_ready(ended, gateway.port, "/readyz", _WAIT_S)
    finally:
        ended.stop()


def test_nobody_is_waited_for_longer_than_allowed(
    gateway: _Gateway, child: MeasuredProcess
) -> None:
    """A process that says nothing of its failure ends the wait all the same."""
    with pytest.raises(UnavailableError, match="not ready after 1 s"):
        wait_until_ready(child, gateway.port, "/readyz", 1.0)
