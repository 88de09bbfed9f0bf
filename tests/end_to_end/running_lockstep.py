"""`lockstep up` as a process of a test, with a plain HTTP client."""

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.captured_process import READY_DEADLINE_S, ROOT, CapturedProcess
from tests.support.ports import free_port
from tests.support.process_table import waits_as_spare
from tests.support.waiting import wait_until

SPARE = "spare of "
"""Before the role in the names of spare processes."""

_LATE_RANK = """
import sys
words = sys.orig_argv
if "rank-worker" in words and words[words.index("--rank") + 1] == "1":
    from tests.chaos.cluster.patched_rank import patch_rank_worker
    from tests.multirank.worlds.slow_rank import delay
    patch_rank_worker(lambda: delay("{kind}", {seconds}))
"""
"""Python runs it at its start, in every process of the cluster."""


class RunningLockstep(CapturedProcess):
    """One supervisor process with all its children."""

    def __init__(
        self,
        run_dir: Path,
        ranks: int = 1,
        *arguments: str,
        program: Sequence[str] = ("-m", "services.commands.main"),
    ) -> None:
        """Start the supervisor without waiting for it.

        Args:
            run_dir: an empty folder.
            ranks: number of ranks.
            arguments: further flags of `lockstep up`.
            program: what Python runs as `lockstep`.
        """
        self.port = free_port()
        self.config_file = run_dir / "config.toml"
        super().__init__(
            [
                *(sys.executable, *program, "up"),
                *("--port", str(self.port), "--ranks", str(ranks), *arguments),
            ],
            {
                # Spares take seconds of processor time in each of many stacks.
                "LOCKSTEP_RANK_WORKER_SPARE": "off",
                **os.environ,
                "LOCKSTEP_PATHS_RUN_DIR": str(run_dir),
                "LOCKSTEP_CACHE_DIRECTORY": str(run_dir / "blocks"),
            },
        )

    def wait_until_ready(self) -> None:
        """Wait for the ready line and for the command that is printed below it."""
        self.wait_for_line("Lockstep is ready")
        self.wait_for_line("  -d '{")

    def wait_until_listening(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until the gateway accepts connections, which may be before or after readiness."""
        wait_until(
            self._is_listening,
            deadline_s,
            poll_s=0.05,
            failure=lambda: f"no process listens on port {self.port}:\n{self.text}",
        )

    def children(self) -> dict[str, int]:
        """Return the pid of every child process by its role, for example "rank-worker 0".

        Spares are not among them.
        """
        return {role: pid for role, pid in self._processes().items() if not role.startswith(SPARE)}

    def spares(self) -> dict[str, int]:
        """Return the pid of every spare process by its rank, for example "rank-worker 0"."""
        found = self._processes().items()
        return {role.removeprefix(SPARE): pid for role, pid in found if role.startswith(SPARE)}

    def _processes(self) -> dict[str, int]:
        found = {}
        # A process may end between the listing and the call.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    words = child.cmdline()
                    if "services.commands.main" in words:
                        role = words[words.index("services.commands.main") + 1]
                        rank = words[words.index("--rank") + 1] if "--rank" in words else ""
                        kind = SPARE if waits_as_spare(child.pid, words) else ""
                        found[f"{kind}{role} {rank}".strip()] = child.pid
        return found

    def readiness(self) -> int:
        """Return the HTTP status of /readyz."""
        with self._connection(10.0) as connection:
            connection.request("GET", "/readyz")
            return connection.getresponse().status

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Kill the supervisor and all its children."""
        children = self._processes().values()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        super().close()

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
        """Send a request and return the JSON of the response.

        Raises:
            AssertionError: the status is not 200.
        """
        status, content, _ = self.exchange(path, body, timeout_s)
        assert status == http.HTTPStatus.OK, content
        answer: dict[str, Any] = json.loads(content)
        return answer

    def exchange(
        self, path: str, body: dict[str, Any], timeout_s: float = 60.0
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Send a POST request; return the status, the body and the headers of the response."""
        with self._connection(timeout_s) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read(), response.headers

    def stream(
        self, path: str, body: dict[str, Any], timeout_s: float = 90.0, key: str = ""
    ) -> Iterator[Any]:
        """Send a streaming request; yield the JSON of each event, and "[DONE]" as a string."""
        with self._connection(timeout_s) as connection:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
            response = connection.getresponse()
            assert response.status == http.HTTPStatus.OK, response.read()
            for line in response:
                if line.startswith(b"data: "):
                    data = line[len(b"data: ") :].strip()
                    yield "[DONE]" if data == b"[DONE]" else json.loads(data)

    @contextlib.contextmanager
    def _connection(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            yield connection
        finally:
            connection.close()

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running_lockstep(
    run_dir: Path, ranks: int = 1, *arguments: str, settings: str = "", **options: Any
) -> Iterator[RunningLockstep]:
    """Start Lockstep, wait until it is ready, and end every process after the block.

    Args:
        run_dir: an empty folder.
        ranks: number of ranks.
        arguments: further flags of `lockstep up`.
        settings: content of a configuration file; "": no such file.
        options: further arguments of `RunningLockstep`.
    """
    if settings:
        (run_dir / "own.toml").write_text(settings)
        arguments = ("--config", str(run_dir / "own.toml"), *arguments)
    with contextlib.closing(RunningLockstep(run_dir, ranks, *arguments, **options)) as running:
        running.wait_until_ready()
        yield running


def path_of_late_rank(folder: Path, kind: str, seconds: float) -> str:
    """Return the PYTHONPATH with which rank 1 of a Lockstep is late.

    Args:
        folder: an empty folder.
        kind: where it is late, as in `tests.multirank.worlds.slow_rank`.
        seconds: how much each time.
    """
    (folder / "sitecustomize.py").write_text(_LATE_RANK.format(kind=kind, seconds=seconds))
    return os.pathsep.join([str(folder), str(ROOT)])


class StreamReader:
    """A stream that a thread reads as fast as it arrives."""

    def __init__(self, stream: Iterator[Any]) -> None:
        """Return when the first event has arrived."""
        self.events = [next(stream)]
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Tell whether the stream has ended."""
        return not self._thread.is_alive()

    def text(self, deadline_s: float = READY_DEADLINE_S) -> str:
        """Wait for the end of a stream of one completion and return its text.

        Raises:
            AssertionError: the stream did not end with "[DONE]" within `deadline_s` seconds.
        """
        self._thread.join(deadline_s)
        assert self.is_done, f"the stream stopped after {len(self.events)} events"
        assert self.error is None, self.error
        assert self.events[-1] == "[DONE]", self.events[-1]
        return "".join(event["choices"][0]["text"] for event in self.events[:-1])

    def _read(self, stream: Iterator[Any]) -> None:
        try:
            self.events.extend(stream)
        except Exception as error:  # noqa: BLE001 - `text` raises it in the test
            self.error = error
