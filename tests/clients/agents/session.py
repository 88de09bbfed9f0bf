"""A session of a real client: its home, its folder and its runs.

Owns its start without a network; the task is in `task`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients.agents.installation import PROGRAMS
from tests.clients.agents.isolation.namespaces import CutOffProcess
from tests.clients.agents.isolation.relay import Relay
from tests.clients.task import FILE, Task
from tests.support.captured_process import ROOT

RUN_DEADLINE_S = 240.0
"""On a busy machine; a run takes seconds."""


class Session:
    """One client with a home and a folder of its own."""

    def __init__(self, task: Task, home: Path, relay: Relay, port: int) -> None:
        """Prepare the folders.

        Args:
            task: what the client shall do, and where.
            home: the client's home, to be made.
            relay: forwards its requests.
            port: the gateway's port, which is also the port that the client connects to.
        """
        self.agent = task.agent
        self.task = task
        self._relay = relay
        self._port = port
        self._home = home
        self._output = home / "output.txt"
        self._home.mkdir(parents=True)
        self.task.folder.mkdir(parents=True)
        self.file = self.task.folder / FILE
        self.file.write_text(f"{self.task.old}\n")

    @property
    def output(self) -> str:
        """All that the client printed."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def begin(self) -> str:
        """Give the task, and return the client's output until it ends."""
        return self._run(self.agent.begin(self.task.request))

    def go_on(self) -> str:
        """Ask the question, if possible in the same session, and return the client's output."""
        return self._run(self.agent.go_on(self.task.question))

    def _run(self, words: Sequence[str]) -> str:
        launch = ["-m", "services.commands.main", "launch", self.agent.name, "--run"]
        server = f"http://127.0.0.1:{self._port}"
        environment = {
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self._home),
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            **self.agent.variables,
        }
        before = len(self.output)
        with self._output.open("ab") as output:
            cut_off = CutOffProcess(
                [sys.executable, *launch, "--url", server, "--", *words],
                self._port,
                self.task.folder,
                environment,
                output,
            )
            try:
                with self._relay.listening(cut_off.listener):
                    code = cut_off.process.wait(RUN_DEADLINE_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{self.agent.name} did not end") from None
            finally:
                cut_off.close()
        said = self.output[before:]
        assert code == 0, f"{self.agent.name} ended with {code}:\n{said}"
        return said
