"""A child process whose output is collected in the background."""

import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY_DEADLINE_S = 90.0
"""On two cores that other tests keep busy, a start of three seconds can take half a minute."""


class CapturedProcess:
    """One process; a thread reads its output line by line."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the process in the repository's root.

        Args:
            command: program and arguments.
            environment: the complete environment; None: that of the test.
        """
        self.lines: list[str] = []
        self._new_lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def wait_for_line(self, *texts: str, deadline_s: float = READY_DEADLINE_S) -> str:
        """Return the next line that contains one of `texts`. Each line is returned at most once.

        Raises:
            AssertionError: no such line within `deadline_s` seconds, or the process ended first.
        """
        wanted = " or ".join(map(repr, texts))
        end_s = time.monotonic() + deadline_s
        while True:
            try:
                line = self._new_lines.get(timeout=max(0.01, end_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {wanted} within {deadline_s} s:\n{self.text}") from None
            if line is None:
                raise AssertionError(f"ended without {wanted}:\n{self.text}")
            if any(text in line for text in texts):
                return line

    def wait(self, deadline_s: float = 60.0) -> int:
        """Wait for the end of the process and return its exit code.

        Raises:
            AssertionError: the process still runs after `deadline_s` seconds.
        """
        try:
            return self.process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {deadline_s} s:\n{self.text}") from None

    def close(self) -> None:
        """Kill the process if it still runs; its children end with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._new_lines.put(line.rstrip())
        self._new_lines.put(None)
