"""A wait for a server ends when the server is ready, has ended, or can never become ready."""

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
from tests.support.background_server import run_in_background

_WAIT_S = 60.0


class _Gateway(http.server.ThreadingHTTPServer):
    """HTTP server with a gateway's status document."""

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
        """Write no log."""


@pytest.fixture
def gateway() -> Iterator[_Gateway]:
    """A running server on loopback."""
    running = _Gateway()
    with run_in_background(running):
        yield running


def _child(folder: Path, code: str) -> MeasuredProcess:
    return MeasuredProcess("the stack", [sys.executable, "-c", code], folder / "log")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[MeasuredProcess]:
    """A process that runs until it is stopped."""
    one = _child(tmp_path, "print('a last word', flush=True); import time; time.sleep(600)")
    yield one
    one.stop()


def test_wait_for_server_lasts_until_ready_when_no_failure_is_reported(
    gateway: _Gateway, child: MeasuredProcess
) -> None:
    """An empty failure and a missing scheduler status do not end the wait."""
    find_failure = functools.partial(failure_reason, gateway.port)
    threading.Timer(0.3, lambda: setattr(gateway, "scheduler_reports", True)).start()
    threading.Timer(0.6, lambda: setattr(gateway, "is_ready", True)).start()
    gateway.scheduler_reports = False

    wait_until_ready(child, gateway.port, "/readyz", _WAIT_S, find_failure)

    assert gateway.is_ready


def test_wait_for_server_raises_error_when_scheduler_stops_starting_epochs(
    gateway: _Gateway, child: MeasuredProcess
) -> None:
    """The error contains the cause and the end of the log, long before the timeout."""
    gateway.failure = "epochs"
    find_failure = functools.partial(failure_reason, gateway.port)
    began_s = time.monotonic()

    with pytest.raises(UnavailableError, match=r"never be ready \(rank 1 has no memory\)") as error:
        wait_until_ready(child, gateway.port, "/readyz", _WAIT_S, find_failure)

    assert time.monotonic() - began_s < _WAIT_S
    assert "The end of its log" in str(error.value)


def test_wait_for_server_raises_error_with_exit_code_when_process_exits(
    gateway: _Gateway, tmp_path: Path
) -> None:
    """The error contains the exit code and the end of the log."""
    ended = _child(tmp_path, "import sys; print('no such model'); sys.exit(78)")
    try:
        with pytest.raises(UnavailableError, match=r"(?s)exit code 78.*no such model"):
            wait_until_ready(ended, gateway.port, "/readyz", _WAIT_S)
    finally:
        ended.stop()


def test_wait_for_server_raises_error_at_timeout_when_server_stays_unready(
    gateway: _Gateway, child: MeasuredProcess
) -> None:
    """A process that neither becomes ready nor reports a failure is waited for until the
    timeout."""
    with pytest.raises(UnavailableError, match="not ready after 1 s"):
        wait_until_ready(child, gateway.port, "/readyz", 1.0)
