"""One child process of the supervisor. Owns its start, restart delay, log output and end."""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from services.supervisor.children.effective_config import RunFiles
from services.supervisor.children.started_process import StartedProcess
from services.supervisor.console.console import Console, Level
from shared import limits
from shared.errors import ConfigError

PERMANENT = frozenset({limits.EXIT_CONFIG, limits.EXIT_USAGE})
"""Exit codes after which a restart cannot help."""

RANK = "rank"
"""First word of the names of ranks."""

LATE_RANK = (
    " (joining or loading took too long; its stacks are above; see scheduler.init_deadline_s, "
    "scheduler.load_deadline_s)"
)
"""What exit code 1 of a rank means: it may have been inside C code, which says nothing."""

KILL_DEADLINE_S = 5.0
"""Longest wait for a killed process to be reaped, in seconds."""

FIRST_DELAY_S = 0.1
"""First restart delay in seconds. Ranks exit at the end of every epoch, so fast restarts are the
normal case."""

LONGEST_DELAY_S = 10.0
"""Longest restart delay in seconds, so that a repaired cause is noticed soon."""

HEALTHY_AFTER_S = 60.0
"""A process that ran this long was healthy: its next restart delay is the first one again."""


class Backoff:
    """Restart delays of one process in seconds, from `FIRST_DELAY_S` up to `LONGEST_DELAY_S`.

    Each exit by its own fault doubles the next delay. A run of `HEALTHY_AFTER_S` makes it the first
    one again.
    """

    def __init__(self) -> None:
        self._next_delay_s = FIRST_DELAY_S

    def after(self, ran_for_s: float, *, is_own_fault: bool = True) -> float:
        """Return the restart delay in seconds for a process that has exited, and set the next one.

        Args:
            ran_for_s: seconds from the process's start to its exit.
            is_own_fault: False if the process was told to end; the next delay then stays the same.
        """
        if ran_for_s >= HEALTHY_AFTER_S:
            self.reset_backoff()
        delay_s = self._next_delay_s
        if is_own_fault:
            self._next_delay_s = min(self._next_delay_s * 2.0, LONGEST_DELAY_S)
        return delay_s

    def reset_backoff(self) -> None:
        """Make the next restart delay the first one again."""
        self._next_delay_s = FIRST_DELAY_S


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """A child's name in the log, and the arguments of the `lockstep` command that runs it."""

    name: str
    """`scheduler`, `store`, `gateway`, or `rank` with its number."""
    arguments: tuple[str, ...]
    """Words after `lockstep`, such as ("rank-worker", "--rank", "0")."""


def command(python: str, role: Role, config_file: str) -> list[str]:
    """Return the command line that starts a role's process.

    Args:
        python: path of the Python interpreter.
        role: contains the role's arguments.
        config_file: path of the configuration file that the process reads.
    """
    # -P keeps a folder named `services` in the working directory from being imported.
    return [python, "-P", "-m", "services.commands.main", *role.arguments, "--config", config_file]


class Child:
    """One role's process: starts it, restarts it after delays, forwards its output, ends it.

    Every `now_s` is the supervisor's own time in seconds. It advances by at most 1 s per tick, so
    that no process is blamed for a time in which the supervisor itself was suspended.
    """

    def __init__(
        self,
        role: Role,
        files: RunFiles,
        environment: dict[str, str],
        console: Console,
        spare: "Child | None" = None,
    ) -> None:
        """Prepare the process; `start_if_due` starts it.

        Args:
            role: name and arguments of the process.
            files: the files that it reads, which each start restores first.
            environment: all its environment variables.
            console: receives its output line by line.
            spare: its process, if one runs, takes the place of one that has exited.
        """
        self.role = role
        self.spare = spare
        self.starts = 0
        """Number of processes started so far."""
        self.has_worked = False
        """A process has worked properly, so its settings were right once."""
        self.last_code = limits.EXIT_OK
        """Exit code of the previous process. A negative number is the signal that ended it."""
        self._command: Sequence[str] = command(sys.executable, role, str(files.config_file))
        self._files = files
        self._environment = environment
        self._console = console
        self._backoff = Backoff()
        self._process: StartedProcess | None = None
        self._started_at_s = 0.0
        self._start_at_s = 0.0
        self._stopped_at_s: float | None = None
        self._is_killed = False

    @property
    def pid(self) -> int | None:
        """Process id, or None while no process runs."""
        return self._process.pid if self._process else None

    def start_if_due(self, now_s: float) -> None:
        """Start the process if none runs and the restart delay since the last exit is over.

        A spare process takes the place instead of a new one.

        Args:
            now_s: the supervisor's time in seconds.
        """
        if self._process is not None or now_s < self._start_at_s:
            return
        try:
            self._files.restore()
            self._process = self._take_spare(now_s) or StartedProcess(
                self.role.name, self._command, self._environment, self._console
            )
        except (OSError, ConfigError) as error:
            # A lack of descriptors, memory, disk space or process slots may be temporary.
            delay_s = self._backoff.after(0.0)
            self._start_at_s = now_s + delay_s
            cause = error.strerror if isinstance(error, OSError) else error
            self._console.log_line(
                f"cannot start {self.role.name} ({cause}); retrying in {delay_s:.1f} s", "error"
            )
            return
        self.starts += 1
        self._started_at_s = now_s
        # The system reports a stop once: that of a spare was reported before it took the place.
        self._stopped_at_s = self._process.stopped_at_s
        self._is_killed = False

    def reset_backoff(self) -> None:
        """Set the next restart delay to the shortest, because the process has worked properly."""
        self.has_worked = True
        self._backoff.reset_backoff()

    def disable_restart(self) -> None:
        """Prevent all later starts. Call it after `reap` has returned an exit code."""
        self._start_at_s = math.inf

    def retry_slowly(self, now_s: float) -> None:
        """Make the next start `LONGEST_DELAY_S` from now. Call it after `reap`.

        Args:
            now_s: the supervisor's time in seconds.
        """
        self._start_at_s = now_s + LONGEST_DELAY_S

    def stopped_s(self, now_s: float) -> float:
        """Return the seconds for which the process has been stopped (SIGSTOP), 0.0 while it runs.

        Args:
            now_s: the supervisor's time in seconds.
        """
        return 0.0 if self._stopped_at_s is None else now_s - self._stopped_at_s

    def reap(self, now_s: float) -> int | None:
        """Return the exit code if the process has exited since the last call, else None.

        After an exit, set the time of the restart and log it. Also record for `stopped_s` whether
        the process was stopped (SIGSTOP) or continued.

        Args:
            now_s: the supervisor's time in seconds.

        Returns:
            The exit code; a negative number is the signal that ended the process.
        """
        if self._process is None or not self.has_ended(now_s):
            return None
        code = self.last_code
        ran_for_s = now_s - self._started_at_s
        delay_s = self._backoff.after(ran_for_s, is_own_fault=code != limits.EXIT_WORLD_LOST)
        # The first restart needs no delay where a spare is ready for it.
        has_successor = self.spare is not None and self.spare.pid is not None
        if has_successor and delay_s <= FIRST_DELAY_S:
            delay_s = 0.0
        self._start_at_s = now_s + delay_s
        if code not in PERMANENT:
            how = f"signal {-code}" if code < 0 else f"code {code}"
            level: Level = "info" if code == limits.EXIT_WORLD_LOST else "warning"
            if code == limits.EXIT_DEADLINE and self.role.name.startswith(RANK):
                how += LATE_RANK
            self._console.log_line(
                f"{self.role.name} exited with {how}; restarting in {delay_s:.1f} s", level
            )
        return code

    def give_up(self, now_s: float) -> StartedProcess | None:
        """Return this spare's process, which is no longer this child's; None if none runs.

        Args:
            now_s: the supervisor's time in seconds.
        """
        if self.has_ended(now_s):
            return None
        process, self._process = self._process, None
        if process is not None:
            process.stopped_at_s = self._stopped_at_s
        return process

    def terminate(self) -> None:
        """Send SIGTERM to the process, if one runs. Does not wait for its end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.popen.terminate()

    def has_ended(self, now_s: float) -> bool:
        """Return whether no process runs any more; unlike `reap`, schedule no restart.

        Args:
            now_s: the supervisor's time in seconds.
        """
        if self._process is not None:
            code = self._poll_exit(now_s)
            if code is not None:
                self.last_code = code
                self._release_process()
        return self._process is None

    def kill_stuck(self, why: str) -> None:
        """Send SIGKILL, once, to a process that cannot end by itself and to its children; log why.

        Does not wait for its end, which a later `reap` finds.

        Args:
            why: the rest of a log sentence that begins with the role's name, for example "has been
                stopped for 10 s".
        """
        if self._process is not None and not self._is_killed:
            self._is_killed = True
            self._console.log_line(f"{self.role.name} {why}: killing it", "warning")
            self._process.kill_group()

    def kill(self) -> None:
        """Kill the process and its own children, and wait up to `KILL_DEADLINE_S` for its end."""
        if self._process is None:
            return
        self._process.kill_group()
        # A process inside a system call that never returns cannot be reaped.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.popen.wait(KILL_DEADLINE_S)
        self.last_code = -signal.SIGKILL
        self._release_process()

    def _poll_exit(self, now_s: float) -> int | None:
        """Return the exit code of an ended process, else None. Records stops and continues."""
        assert self._process is not None
        if self._process.popen.returncode is not None:
            return int(self._process.popen.returncode)
        # Only this call reports stops to the parent; Popen asks for exits only.
        options = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        try:
            pid, status = os.waitpid(self._process.pid, options)
        except ChildProcessError:
            # If SIGCHLD is ignored in this process, the kernel keeps no exit codes.
            self._process.popen.returncode = limits.EXIT_SOFTWARE
            return limits.EXIT_SOFTWARE
        if pid == 0:
            return None
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            self._stopped_at_s = now_s if os.WIFSTOPPED(status) else None
            return None
        self._process.popen.returncode = os.waitstatus_to_exitcode(status)
        return int(self._process.popen.returncode)

    def _take_spare(self, now_s: float) -> StartedProcess | None:
        """Return the spare's process as this role's own; None without one that runs."""
        if self.spare is None or (process := self.spare.give_up(now_s)) is None:
            return None
        process.name = self.role.name
        process.give_turn()
        self._console.log_line(f"{self.role.name} continues in its spare process {process.pid}")
        return process

    def _release_process(self) -> None:
        assert self._process is not None
        self._process.release()
        self._process = None
