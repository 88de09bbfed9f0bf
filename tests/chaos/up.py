"""`lockstep up` as a process of this harness, with all its children."""

import os
import signal
import subprocess
import sys
import time

from shared.os import lifeline
from tests.chaos import processes
from tests.chaos.stack import ROOT, Shape, Stack, Stuck

END_DEADLINE_S = 15.0


class Up(Stack):
    """One supervisor and its children, as a user starts them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._process: subprocess.Popen[str] | None = None
        self._held = -1

    @property
    def supervisor_pid(self) -> int:
        """The process that a user would have started."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start `lockstep up`; it ends when this process does, whatever the cause."""
        read_end, self._held = os.pipe()
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
        return processes.children(self.supervisor_pid)

    def kill_supervisor(self) -> list[int]:
        """SIGKILL the supervisor; return the pids of all that it had started."""
        left = [pid for pid in processes.naming(self.folder) if pid != self.supervisor_pid]
        assert self._process is not None
        self.log.note(f"SIGKILL to the supervisor, pid {self.supervisor_pid}")
        self._process.kill()
        self._process.wait()
        os.close(self._held)
        self._process = None
        return left

    def end(self) -> None:
        """Stop as Ctrl-C does; kill what does not end."""
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
        os.close(self._held)
        self._process = None
        left = processes.wait_gone(processes.naming(self.folder), 3.0)
        for pid in left:
            processes.send(pid, signal.SIGKILL)
        if left:
            raise Stuck(f"processes {left} outlived `lockstep up`")
