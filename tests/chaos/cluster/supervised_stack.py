"""`lockstep up` as a child process, with all processes that it starts."""

import os
import signal
import subprocess
import sys
import time

from shared.os import lifeline
from tests.chaos.cluster import processes
from tests.chaos.cluster.stack import ROOT, DeadlineExceeded, Stack, StackOptions

END_DEADLINE_S = 15.0


class SupervisedStack(Stack):
    """A supervisor and its children, started as a user does."""

    def __init__(self, options: StackOptions) -> None:
        super().__init__(options)
        self._process: subprocess.Popen[str] | None = None
        self._lifeline = -1

    @property
    def supervisor_pid(self) -> int:
        """Process id of `lockstep up`."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start `lockstep up`; it also ends when this process dies and its lifeline closes."""
        read_end, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "services.commands.main",
                    "up",
                    "--config",
                    str(self.config_file),
                ],
                cwd=ROOT,
                env={**self.environment, lifeline.VARIABLE: str(read_end)},
                pass_fds=(read_end,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
        finally:
            os.close(read_end)
        assert self._process.stdout is not None
        self.log.read(self._process.stdout)

    def pids(self) -> dict[str, int]:
        """Return the supervisor's children by role."""
        return processes.child_roles(self.supervisor_pid)

    def kill_supervisor(self) -> list[int]:
        """Kill the supervisor with SIGKILL; return the pids of its children."""
        left = [pid for pid in processes.pids_naming(self.folder) if pid != self.supervisor_pid]
        assert self._process is not None
        self.log.note(f"SIGKILL to the supervisor, pid {self.supervisor_pid}")
        self._process.kill()
        self._process.wait()
        os.close(self._lifeline)
        self._process = None
        return left

    def end(self) -> None:
        """Interrupt as two presses of Ctrl-C do; kill processes that do not end."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._lifeline)
        self._process = None
        left = processes.wait_gone(processes.pids_naming(self.folder), 3.0)
        for pid in left:
            processes.send_signal(pid, signal.SIGKILL)
        if left:
            raise DeadlineExceeded(f"processes {left} still run after `lockstep up` ended")
