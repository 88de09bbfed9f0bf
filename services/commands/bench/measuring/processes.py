"""Starting what is measured, waiting for it, talking to it, stopping it. No measuring here."""

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
from typing import Any

import services
from shared.errors import UnavailableError
from shared.os import lifeline

IMPORT_ROOT = Path(services.__file__).resolve().parents[1]
_CONSOLE_SCRIPT = """
import sys
from shared.os import lifeline
lifeline.exit_with_parent()
from services.commands.main import main
sys.exit(main())
"""
LOCKSTEP_COMMAND = [sys.executable, "-c", _CONSOLE_SCRIPT]
"""The console script of this very installation; its arguments follow. Ends when we do."""


def free_port() -> int:
    """Return a TCP port that nobody listens on at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def print_progress(text: str) -> None:
    """Tell a person on standard error how far it is."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


class MeasuredProcess:
    """A process that ends when this one does, or when `stop` is called. Its log goes to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        piped: bool = False,
    ) -> None:
        """Start it.

        Args:
            name: for error messages.
            command: program and arguments.
            log: file that standard error (and output, unless it piped) is appended to.
            environment: variables to add to this process's own.
            piped: its standard input and output are for orders and answers.
        """
        self.name = name
        self.log = log
        read_end, self._lifeline = os.pipe()
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                part for part in (str(IMPORT_ROOT), os.environ.get("PYTHONPATH", "")) if part
            ),
            lifeline.VARIABLE: str(read_end),
            **(environment or {}),
        }
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

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    def request(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Send one JSON line and return the JSON line that answers it. Raises as `read`."""
        self.send(order)
        return self.receive()

    def send(self, order: Mapping[str, Any]) -> None:
        """Send one JSON line.

        Raises:
            UnavailableError: it has ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("has ended") from None

    def receive(self) -> dict[str, Any]:
        """Return the next JSON line it writes.

        Raises:
            UnavailableError: it ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(timeout=10)
            raise self.failure(f"ended with exit code {self.process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def failure(self, what: str) -> UnavailableError:
        """Return an error with the end of the child's log."""
        tail = self.log.read_text(errors="replace")[-2_000:]
        return UnavailableError(f"{self.name} {what}. The end of its log:\n{tail}")

    def pause(self) -> None:
        """Stop the whole process group, so that it costs nothing while another is measured."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    def stop(self, wait_s: float = 15.0) -> None:
        """End it: politely, then not."""
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
        with contextlib.suppress(OSError):
            os.close(self._lifeline)


def get_json(port: int, path: str, timeout_s: float = 5.0) -> tuple[int, Any]:
    """Return status and parsed body of a GET on this machine; (0, None) when nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path)
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
    given_up: Callable[[], str] | None = None,
) -> None:
    """Wait until a GET answers 200.

    Args:
        child: who answers.
        port: where.
        path: what is asked for.
        timeout_s: how long it may take.
        given_up: tells why it will never be ready, "" while it may be; None: nobody can tell.

    Raises:
        UnavailableError: the process ended, has given up, or was not ready in time.
    """
    until_s = time.monotonic() + timeout_s
    while get_json(port, path)[0] != 200:
        if child.process.poll() is not None:
            raise child.failure(f"ended with exit code {child.process.returncode}")
        if given_up is not None and (reason := given_up()):
            raise child.failure(f"will never be ready ({reason})")
        if time.monotonic() > until_s:
            raise child.failure(f"was not ready after {timeout_s:.0f} s")
        time.sleep(0.2)
