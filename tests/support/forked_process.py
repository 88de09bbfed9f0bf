"""Processes forked from one that has imported their modules, so that each starts in a moment.

A gateway spends two seconds on imports, most of them on those of its tokenizer.

    python -m tests.support.forked_process DESCRIPTOR MODULE...
"""

import contextlib
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

_NUMBER = struct.Struct("!i")
_SIZE = struct.Struct("!I")


class _Order(NamedTuple):
    program: str
    """File with the code."""
    arguments: list[str]
    environment: dict[str, str]


class ForkServer:
    """A process that imports modules once and then forks for each process that is wanted."""

    def __init__(self, modules: list[str], environment: Mapping[str, str]) -> None:
        """Start it.

        Args:
            modules: names of the modules that it imports.
            environment: its environment while it imports them.
        """
        self._orders, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._programs = tempfile.TemporaryDirectory()
        self._started = itertools.count()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                env=dict(environment),
                cwd=Path(__file__).resolve().parents[2],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def start(
        self, code: str, arguments: list[str], environment: Mapping[str, str]
    ) -> "ForkedProcess":
        """Start a process that executes Python code.

        Args:
            code: the code.
            arguments: its `sys.argv` after the first.
            environment: its environment variables.
        """
        program = Path(self._programs.name, f"{next(self._started)}.py")
        program.write_text(code)
        body = json.dumps(_Order(str(program), arguments, dict(environment))).encode()
        errors_read, errors_write = os.pipe()
        status_read, status_write = os.pipe()
        with self._lock:
            socket.send_fds(self._orders, [_SIZE.pack(len(body))], [errors_write, status_write])
            self._orders.sendall(body)
        os.close(errors_write)
        os.close(status_write)
        return ForkedProcess(errors_read, status_read)


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use, for a process that is no child of this one."""

    def __init__(self, errors: int, status: int) -> None:
        """Wait until the process has begun.

        Args:
            errors: descriptor from which its standard error is read.
            status: descriptor from which its number and then its exit code are read.
        """
        self.stderr = open(errors, "rb")  # noqa: SIM115 - closed when the context ends
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115 - as above
        self.returncode: int | None = None
        (self.pid,) = _NUMBER.unpack(self._status.read(_NUMBER.size))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stderr.close()
        self.wait()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Args:
            timeout: seconds; None: without limit.

        Raises:
            subprocess.TimeoutExpired: when the process still runs after that time.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            (self.returncode,) = _NUMBER.unpack(self._status.read(_NUMBER.size))
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[None, bytes]:
        """Return what the process wrote to its standard error until its end.

        Raises:
            subprocess.TimeoutExpired: when it still runs after `timeout` seconds.
        """
        ends_at_s = time.monotonic() + timeout
        pieces: list[bytes] = []
        while select.select([self.stderr], [], [], max(0.0, ends_at_s - time.monotonic()))[0]:
            piece = os.read(self.stderr.fileno(), 65_536)
            if not piece:
                self.wait(max(0.0, ends_at_s - time.monotonic()))
                return None, b"".join(pieces)
            pieces.append(piece)
        raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)


def _fork_for_orders(orders: socket.socket) -> _Order:
    """Return in each process that is forked for an order; end when no more can come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        head, descriptors, _, _ = socket.recv_fds(orders, _SIZE.size, 2)
        if not head:
            os._exit(0)
        with orders.makefile("rb", buffering=0) as file:
            body = _read(file, _SIZE.unpack(head)[0])
        errors, status = descriptors
        # The process in between waits for the end of its child, which is no child of the test.
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pid = os.fork()
            if pid == 0:
                os.close(status)
                os.dup2(errors, sys.stderr.fileno())
                os.close(errors)
                return _Order(*json.loads(body))
            os.close(errors)
            os.write(status, _NUMBER.pack(pid))
            _, ended = os.waitpid(pid, 0)
            os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(ended)))
            os._exit(0)
        os.close(errors)
        os.close(status)


def _read(file: Any, size: int) -> bytes:
    body = b""
    while len(body) < size and (piece := file.read(size - len(body))):
        body += piece
    return body


def main() -> None:
    """Import modules, then run the program of each order in a process of its own."""
    descriptor, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    order = _fork_for_orders(socket.socket(fileno=int(descriptor)))
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv[1:] = order.arguments
    runpy.run_path(order.program, run_name="__main__")


if __name__ == "__main__":
    main()
