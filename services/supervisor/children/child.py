"""One child process: how it is started, watched, started again and ended."""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from services.supervisor.children.backoff import Backoff
from services.supervisor.console.console import Console
from shared import limits
from shared.os import lifeline

PERMANENT = frozenset({limits.EXIT_CONFIG, limits.EXIT_USAGE})
"""Exit codes that say: starting again cannot help."""

LINE_CHARS_MAX = 1 << 16
"""Longest piece of a child's log that is held: a traceback in JSON is a few thousand characters."""

KILL_DEADLINE_S = 5.0
"""A process that was killed gets so long to be gone before the supervisor ends without it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """What a child is: its name in the log and its part of the command line."""

    name: str
    arguments: tuple[str, ...]


def command(python: str, role: Role, config_file: str) -> list[str]:
    """Return the command line of a role's process."""
    # -P: never run a `services` folder that happens to lie in the working directory.
    return [python, "-P", "-m", "services.commands.main", *role.arguments, "--config", config_file]


class Child:
    """A role's process, whichever incarnation of it runs at the moment."""

    def __init__(
        self, role: Role, config_file: Path, environment: dict[str, str], console: Console
    ) -> None:
        self.role = role
        self.starts = 0
        self.last_code = limits.EXIT_OK
        """Exit code of the process that ended last; negative: the signal that ended it."""
        self._command: Sequence[str] = command(sys.executable, role, str(config_file))
        self._environment = environment
        self._console = console
        self._backoff = Backoff()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lifeline = -1
        self._started_at_s = 0.0
        self._start_at_s = 0.0
        self._stopped_at_s: float | None = None
        self._is_struck = False

    @property
    def pid(self) -> int | None:
        """Process id, or None while there is no process."""
        return self._process.pid if self._process else None

    def start_if_due(self, now_s: float) -> None:
        """Start the process when there is none and its waiting time is over."""
        if self._process is None and now_s >= self._start_at_s:
            self._start(now_s)

    def reset_backoff(self) -> None:
        """The process serves: when it ends it is started again without delay."""
        self._backoff.reset_backoff()

    def give_up(self) -> None:
        """Start it no more."""
        self._start_at_s = math.inf

    def stopped_s(self, now_s: float) -> float:
        """Return for how long the process has been stopped (SIGSTOP), 0.0 while it runs."""
        return 0.0 if self._stopped_at_s is None else now_s - self._stopped_at_s

    def reap(self, now_s: float) -> int | None:
        """Return the exit code when the process has exited since the last call, else None."""
        if self._process is None:
            return None
        code = self._look(now_s)
        if code is None:
            return None
        self.last_code = code
        self._forget()
        told_to_end = code == limits.EXIT_WORLD_LOST
        wait_s = self._backoff.after(now_s - self._started_at_s, is_own_fault=not told_to_end)
        self._start_at_s = now_s + wait_s
        if code not in PERMANENT:
            how = f"signal {-code}" if code < 0 else f"code {code}"
            self._console.line(
                "lockstep",
                f"{self.role.name} exited with {how}; it is started again in {wait_s:.1f} s",
            )
        return code

    def terminate(self) -> None:
        """Ask the process to end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def has_ended(self, now_s: float) -> bool:
        """Tell whether there is no process any more; reaps it."""
        if self._process is not None:
            code = self._look(now_s)
            if code is not None:
                self.last_code = code
                self._forget()
        return self._process is None

    def kill_stuck(self, why: str) -> None:
        """Kill the process and whatever it has started, and say why. Its end is not waited for."""
        if self._process is not None and not self._is_struck:
            self._is_struck = True
            self._console.line("lockstep", f"{self.role.name} {why}: it is killed")
            self._kill_group()

    def kill(self) -> None:
        """End the process and whatever it has started, at once."""
        if self._process is None:
            return
        self._kill_group()
        # A process inside a system call that never returns cannot be waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_DEADLINE_S)
        self.last_code = -signal.SIGKILL
        self._forget()

    def _kill_group(self) -> None:
        assert self._process is not None
        # It leads its own group, so nothing else can be meant.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _look(self, now_s: float) -> int | None:
        """Return the exit code once there is one; note meanwhile whether the process is stopped."""
        assert self._process is not None
        if self._process.returncode is not None:
            return int(self._process.returncode)
        # Only the parent is told of stops, and by this call alone; Popen asks for ends only.
        options = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        try:
            pid, status = os.waitpid(self._process.pid, options)
        except ChildProcessError:
            # Started by something that ignores SIGCHLD: the kernel keeps no exit codes then.
            self._process.returncode = limits.EXIT_SOFTWARE
            return limits.EXIT_SOFTWARE
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            self._stopped_at_s = now_s
            return None
        if os.WIFCONTINUED(status):
            self._stopped_at_s = None
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return int(self._process.returncode)

    def _start(self, now_s: float) -> None:
        try:
            self._process = self._spawn()
        except OSError as error:
            # No descriptor, no memory, or too many processes: that may pass.
            wait_s = self._backoff.after(0.0)
            self._start_at_s = now_s + wait_s
            self._console.line(
                "lockstep",
                f"{self.role.name} cannot be started ({error.strerror}); "
                f"it is tried again in {wait_s:.1f} s",
            )
            return
        self.starts += 1
        self._started_at_s = now_s
        self._stopped_at_s = None
        self._is_struck = False
        self._reader = threading.Thread(
            target=self._read, args=(self._process,), name=f"log-{self.role.name}", daemon=True
        )
        self._reader.start()

    def _spawn(self) -> "subprocess.Popen[str]":
        """Return a new process that holds the read end of a new lifeline. Raises OSError."""
        read_end, write_end = os.pipe()
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                # Only the read end goes along: a child that held a sibling's write end would keep
                # the sibling alive.
                pass_fds=(read_end,),
                env={**self._environment, lifeline.VARIABLE: str(read_end)},
                # Its own session: Ctrl-C at the terminal reaches the supervisor alone.
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self._lifeline = write_end
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            # What never ends a line is shown in pieces.
            while line := process.stdout.readline(LINE_CHARS_MAX):
                self._console.line(self.role.name, line.rstrip())

    def _forget(self) -> None:
        """Give back what the ended process held; its last lines are read first."""
        assert self._process is not None
        assert self._process.stdout is not None
        if self._reader is not None:
            self._reader.join(timeout=1.0)
        self._process.stdout.close()
        os.close(self._lifeline)
        self._process = None
