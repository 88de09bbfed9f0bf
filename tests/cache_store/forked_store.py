"""A store process that starts in 20 ms: a server that has imported everything forks it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from shared.os.lifeline import VARIABLE
from tests.cache_store.running_store import DEADLINE_S, ROOT, RunningStore

_FORK_SERVER = """
import os, sys
from services.commands import main as cli
from services.cache_store import main
for _ in sys.stdin:
    child = os.fork()
    if not child:
        os._exit(cli.main(["cache-store"]))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ForkedStore(RunningStore):
    """A `RunningStore` for tests that start many processes."""

    def __init__(self, home: Path, **settings: str) -> None:
        """Start the process that forks; `start` starts the first store."""
        super().__init__(home, **settings)
        with self.log.open("ab") as log:
            self._fork_server = subprocess.Popen(
                [sys.executable, "-c", _FORK_SERVER],
                cwd=ROOT,
                env={**self.environment, VARIABLE: str(self._lifeline)},
                pass_fds=[self._lifeline],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._child = 0
        self._ended = threading.Event()
        self._exit_code = 0

    def start(self) -> None:
        """Start a store process."""
        assert self._fork_server.stdin is not None
        assert self._fork_server.stdout is not None
        self._fork_server.stdin.write("start\n")
        self._fork_server.stdin.flush()
        self._child = int(self._fork_server.stdout.readline())
        self._ended.clear()
        threading.Thread(target=self._wait, daemon=True).start()

    def kill(self) -> None:
        """End the process as a crash does; any thread."""
        os.kill(self._child, signal.SIGKILL)
        assert self._ended.wait(DEADLINE_S)

    def stop(self) -> int:
        """Ask the process to end; return its exit code."""
        os.kill(self._child, signal.SIGTERM)
        assert self._ended.wait(DEADLINE_S)
        return self._exit_code

    @property
    def is_alive(self) -> bool:
        """Whether a store process runs."""
        return self._child != 0 and not self._ended.is_set()

    def close(self) -> None:
        """End all processes."""
        if self.is_alive:
            self.kill()
        self._fork_server.kill()
        self._fork_server.communicate()
        super().close()

    def _wait(self) -> None:
        assert self._fork_server.stdout is not None
        self._exit_code = int(self._fork_server.stdout.readline())
        self._ended.set()
