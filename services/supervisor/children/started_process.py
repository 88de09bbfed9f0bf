"""One started process of a role. Owns its lifeline, the forwarding of its output, and its kill."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from services.supervisor.console.console import Console
from shared.os import lifeline

LINE_CHARS_MAX = 1 << 18
"""Longest log line read at once: in JSON the traceback of a deep recursion is 150,000 long."""

_LAST_LINES_S = 1.0
"""Longest wait for the last lines of a process that has ended, in seconds."""


class StartedProcess:
    """A process that leads its own session and ends when this process ends."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], console: Console
    ) -> None:
        """Start the process.

        Args:
            name: of the role, for its lines in the log.
            command: program and arguments.
            environment: all its environment variables, without that of the lifeline.
            console: receives its output line by line.

        Raises:
            OSError: when it cannot be started.
        """
        self.name = name
        self.stopped_at_s: float | None = None
        """Since when it was stopped as a spare, by the supervisor's time; None: it was not."""
        self._console = console
        read_end, self._lifeline = os.pipe()
        try:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                # Only the read end is inherited: a child that held a sibling's write end would
                # keep the sibling alive.
                pass_fds=(read_end,),
                env={**environment, lifeline.VARIABLE: str(read_end)},
                # In its own session the child does not receive Ctrl-C from the terminal.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self._reader = threading.Thread(target=self._read, name=f"log-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    def give_turn(self) -> None:
        """Tell the process, a spare, to take the place that it waits for. It may have ended."""
        with contextlib.suppress(BrokenPipeError):
            lifeline.give_turn(self._lifeline)

    def kill_group(self) -> None:
        """Kill the process and its own children; do not wait for their end."""
        # It leads its own process group, so no other process is killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def release(self) -> None:
        """Read the last lines of the ended process and close its descriptors."""
        assert self.popen.stdout is not None
        self._reader.join(timeout=_LAST_LINES_S)
        self.popen.stdout.close()
        os.close(self._lifeline)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            # Output without line ends is shown in pieces.
            while line := self.popen.stdout.readline(LINE_CHARS_MAX):
                self._console.forward_line(self.name, line.rstrip())
