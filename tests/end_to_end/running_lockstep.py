"""A real `lockstep up` for tests: its processes, what it prints, and a plain HTTP client."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.captured_process import READY_DEADLINE_S, CapturedProcess
from tests.ports import free_port


class RunningLockstep(CapturedProcess):
    """One supervisor process with all its children."""

    def __init__(
        self,
        run_dir: Path,
        ranks: int = 1,
        *arguments: str,
        program: Sequence[str] = ("-m", "services.commands.main"),
    ) -> None:
        """Start it; `wait_for_line` tells how far it is.

        Args:
            run_dir: an empty folder.
            ranks: how many.
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
                **os.environ,
                "LOCKSTEP_PATHS_RUN_DIR": str(run_dir),
                "LOCKSTEP_CACHE_DIRECTORY": str(run_dir / "blocks"),
            },
        )

    def wait_until_ready(self) -> None:
        """Wait for the sentence that says so, and for the command that is printed below it."""
        self.wait_for_line("Lockstep is ready")
        self.wait_for_line("  -d '{")

    def wait_until_listening(self, deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait for the gateway's port: it starts beside the others, and not always before them."""
        until_s = time.monotonic() + deadline_s
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
            except OSError:
                assert time.monotonic() < until_s, f"nobody listens:\n{self.text}"
                time.sleep(0.05)
            else:
                return

    def children(self) -> dict[str, int]:
        """Return the pid of every role that runs as a child."""
        found = {}
        for pid, parent, command in _processes():
            if parent == self.process.pid and "services.commands.main" in command:
                words = command.split("services.commands.main", 1)[1].split()
                rank = words[words.index("--rank") + 1] if "--rank" in words else ""
                found[f"{words[0]} {rank}".strip()] = pid
        return found

    def readiness(self) -> int:
        """Return the HTTP status of /readyz."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10.0)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status
        finally:
            connection.close()

    def interrupt(self) -> None:
        """Press Ctrl-C once."""
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Make sure that nothing of it is left, whatever the test did."""
        children = self.children().values()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        super().close()

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
        """Send a request and return the JSON of a 200 answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
            assert response.status == http.HTTPStatus.OK, content
            answer: dict[str, Any] = json.loads(content)
            return answer
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 90.0) -> Iterator[Any]:
        """Send a streaming request; yield each event's JSON, and "[DONE]" as a string."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
            response = connection.getresponse()
            assert response.status == http.HTTPStatus.OK, response.read()
            for line in response:
                if line.startswith(b"data: "):
                    data = line[len(b"data: ") :].strip()
                    yield "[DONE]" if data == b"[DONE]" else json.loads(data)
        finally:
            connection.close()


class StreamReader:
    """A stream that is read as fast as it comes, while the test does something else."""

    def __init__(self, stream: Iterator[Any]) -> None:
        """Return when the first event is here."""
        self.events = [next(stream)]
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Tell whether the stream has ended."""
        return not self._thread.is_alive()

    def text(self, deadline_s: float = READY_DEADLINE_S) -> str:
        """Wait for the proper end of a stream of one completion and return its text."""
        self._thread.join(deadline_s)
        assert self.is_done, f"{len(self.events)} events, and then nothing"
        assert self.error is None, self.error
        assert self.events[-1] == "[DONE]", self.events[-1]
        return "".join(event["choices"][0]["text"] for event in self.events[:-1])

    def _read(self, stream: Iterator[Any]) -> None:
        try:
            self.events.extend(stream)
        except Exception as error:  # noqa: BLE001 - `text` tells the test
            self.error = error


def wait_until_ended(pids: list[int], deadline_s: float) -> bool:
    """Wait until none of the processes runs any more; False when one still does."""
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        if not set(pids) & {pid for pid, _, _ in _processes()}:
            return True
        time.sleep(0.05)
    return False


def _processes() -> list[tuple[int, int, str]]:
    """Return (pid, parent, command) of all processes that run, those that wait to be reaped not."""
    listed = subprocess.run(
        ["ps", "-axwwo", "pid=,ppid=,stat=,command="], check=True, capture_output=True, text=True
    )
    entries = (line.split(None, 3) for line in listed.stdout.splitlines())
    return [
        (int(entry[0]), int(entry[1]), entry[3])
        for entry in entries
        if len(entry) == 4 and not entry[2].startswith("Z")
    ]
