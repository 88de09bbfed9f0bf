"""Child processes of a benchmark. Owns their start, pipes, pauses and stop; measures nothing."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.text import Text

import services
from shared.errors import UnavailableError
from shared.os import lifeline

IMPORT_ROOT = Path(services.__file__).resolve().parents[1]
"""Folder from which this process imports Lockstep: site-packages or a checkout."""

_CONSOLE_SCRIPT = """
import sys
from shared.os import lifeline
lifeline.exit_with_parent()
from services.commands.main import main
sys.exit(main())
"""
LOCKSTEP_COMMAND = [sys.executable, "-c", _CONSOLE_SCRIPT]
"""Runs this installation's `lockstep` with the arguments appended; exits with its parent."""

_IMPORTED_S = time.monotonic()


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 on which no process listens at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def print_progress(text: str) -> None:
    """Print a line about progress to standard error, after the seconds since the program began."""
    line = Text.assemble((f"bench: {time.monotonic() - _IMPORTED_S:.0f} s: ", "dim"), text)
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


def bench_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the benchmarks as a program.

    Args:
        module: its name after `services.commands.bench.`.
        arguments: arguments of the program.
    """
    return [sys.executable, "-m", f"services.commands.bench.{module}", *arguments]


def last_line(error: UnavailableError) -> str:
    """Return the last line of an error; one with a log ends with the last line of the log."""
    return str(error).strip().splitlines()[-1][:500]


class MeasuredProcess:
    """A child process that exits with this process or on `stop`; its log goes to a file.

    As a context manager, it stops the process at its end.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        piped: bool = False,
    ) -> None:
        """Start the process.

        Args:
            name: for error messages.
            command: program and arguments.
            log: file to which standard error is appended, and standard output unless `piped`.
            environment: variables to add to those of this process.
            piped: connect standard input and output, for `send` and `receive`.
        """
        self.name = name
        self.log = log
        read_end, write_end = os.pipe()
        self._lifeline = os.fdopen(write_end, "wb")
        variables = {**os.environ, lifeline.VARIABLE: str(read_end), **(environment or {})}
        if command[0] == sys.executable:
            # Lets our modules be imported from any folder. Other programs, such as a peer's own
            # environment, must not import our packages.
            paths = (str(IMPORT_ROOT), os.environ.get("PYTHONPATH", ""))
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else stream,
                stderr=stream,
                text=True,
                env=variables,
                pass_fds=(read_end,),
                start_new_session=True,
            )
        os.close(read_end)
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def require_running(self) -> None:
        """Raise an error if the process has ended.

        Raises:
            UnavailableError: with its exit code and the end of its log.
        """
        if self.process.poll() is not None:
            raise self.failure(f"ended with exit code {self.process.returncode}")

    def request(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send an order and wait for its answer.

        Args:
            order: is written as one JSON line to the process's standard input.

        Returns:
            The object of the next JSON line on its standard output.

        Raises:
            UnavailableError: when the process has ended.
        """
        self.send(order)
        return self.receive()

    def send(self, order: Mapping[str, Any]) -> None:
        """Write an order as one JSON line to the process's standard input.

        Raises:
            UnavailableError: when the process has ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("has ended") from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next JSON line on the process's standard output; return its object.

        Raises:
            UnavailableError: when the process ends before it writes a line.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(timeout=10)
            raise self.failure(f"ended with exit code {self.process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def failure(self, problem: str) -> UnavailableError:
        """Return, without raising it, an error with the problem and the end of the process's log.

        Args:
            problem: predicate whose subject is the process, such as "was not ready in time".
        """
        tail = self.log.read_text(errors="replace")[-2_000:]
        return UnavailableError(f"{self.name} {problem}. The end of its log:\n{tail}")

    def pause(self) -> None:
        """Suspend the process group, so that it uses no CPU while another one is measured."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process group that `pause` suspended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    def stop(self, wait_s: float = 15.0) -> None:
        """End the process; kill its group if it still runs after `wait_s` seconds.

        A piped process is told to end by closing its standard input, any other by SIGTERM.
        """
        self.resume()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        else:
            self.process.terminate()
        try:
            self.process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.wait(timeout=5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._lifeline.close()


class MeasuredServer(MeasuredProcess):
    """A server process; `port` is its port on 127.0.0.1, `model` its model's name in requests."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        port: int,
        model: str,
    ) -> None:
        super().__init__(name, command, log, environment)
        self.port = port
        self.model = model


def get_json(port: int, path: str, timeout_s: float = 5.0, api_key: str = "") -> tuple[int, Any]:
    """Send a GET to a server on this machine; return the status and the parsed JSON body.

    Args:
        port: its port on 127.0.0.1.
        path: path of the GET.
        timeout_s: longest wait in seconds for the connection and for each read.
        api_key: key of the server; "": none is sent.

    Returns:
        Status and parsed body. A body that is not JSON becomes None; a status of 0 means that no
        server answered.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    except OSError:
        return 0, None
    finally:
        connection.close()
    try:
        return answer.status, json.loads(body)
    except ValueError:
        return answer.status, None


def wait_until_ready(
    child: MeasuredProcess,
    port: int,
    path: str,
    timeout_s: float,
    find_failure: Callable[[], str] | None = None,
) -> None:
    """Wait until a GET to a server on this machine answers 200.

    Args:
        child: the server.
        port: its port.
        path: path of the GET.
        timeout_s: longest wait in seconds.
        find_failure: returns why the server can never become ready, or "" if it still can.

    Raises:
        UnavailableError: when the server ends, can never become ready, or is not ready in time.
    """
    until_s = time.monotonic() + timeout_s
    while get_json(port, path)[0] != 200:
        child.require_running()
        if find_failure is not None and (reason := find_failure()):
            raise child.failure(f"will never be ready ({reason})")
        if time.monotonic() > until_s:
            raise child.failure(f"was not ready after {timeout_s:.0f} s")
        time.sleep(0.2)
