"""Every role started by the harness itself, each with a configuration of its own.

What `lockstep up` cannot do: a role that dials another address than its peer binds (a proxy is
between them), or a rank that lies. Roles that end are started again at once, as launchd would.
"""

import dataclasses
import os
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from services.supervisor.children import effective_config
from shared.configuration.loading import config_from_tree
from shared.configuration.settings import Config
from shared.os import lifeline
from tests.chaos.stack import ROOT, Shape, Stack

RESTART_S = 0.1
LOOK_S = 0.02
END_DEADLINE_S = 10.0

Command = Callable[[int], list[str]]
"""Takes how often a role was started before; returns what stands behind the interpreter."""


@dataclasses.dataclass(slots=True)
class _Part:
    name: str
    command: Command
    config_file: Path
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    start_at_s: float = 0.0


class Parts(Stack):
    """Scheduler, store, ranks and gateway without a supervisor."""

    def __init__(
        self,
        shape: Shape,
        commands: Mapping[str, Command] | None = None,
        roles: Collection[str] = (),
    ) -> None:
        """Prepare; `commands` replaces how some roles are started, `roles` leaves others away."""
        super().__init__(shape)
        own = dict(commands or {})
        self._parts = [
            _Part(name, own.get(name, _plain(arguments)), self._write_config(name))
            for name, arguments in _roles(shape.ranks).items()
            if not roles or name in roles
        ]
        self._lock = threading.Lock()
        self._is_ending = False
        self._keeper: threading.Thread | None = None
        self._read_end = self._held = -1

    def settings_of(self, name: str) -> dict[str, dict[str, object]]:
        """Return what a role's settings have otherwise than the others': section -> key -> value.

        Subclasses say where each role dials.
        """
        del name
        return {}

    def config_of(self, name: str) -> Config:
        """Return a role's whole configuration."""
        return config_from_tree(
            _merged(effective_config.as_toml(self.config), self.settings_of(name))
        )

    def launch(self) -> None:
        """Start every role, and keep starting those that end."""
        self._read_end, self._held = os.pipe()
        os.set_inheritable(self._read_end, True)
        self._is_ending = False
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
        self._keeper.start()

    def pids(self) -> dict[str, int]:
        """Return what runs at the moment."""
        with self._lock:
            return {
                part.name: part.process.pid
                for part in self._parts
                if part.process is not None and part.process.poll() is None
            }

    def starts(self, name: str) -> int:
        """Return how often a role was started."""
        return next(part.starts for part in self._parts if part.name == name)

    def end(self) -> None:
        """End every process."""
        if self._keeper is None:
            return
        self._is_ending = True
        self._keeper.join()
        self._keeper = None
        # All are children of this process and not reaped, so their numbers are theirs.
        for part in self._parts:
            if part.process is not None:
                part.process.kill()
        for part in self._parts:
            if part.process is not None:
                part.process.wait(END_DEADLINE_S)
                part.process = None
        os.close(self._read_end)
        os.close(self._held)

    def _keep(self) -> None:
        while not self._is_ending:
            with self._lock:
                for part in self._parts:
                    self._look_at(part, time.monotonic())
            time.sleep(LOOK_S)

    def _look_at(self, part: _Part, now_s: float) -> None:
        if part.process is not None and part.process.poll() is not None:
            self.log.note(f"{part.name} exited with {part.process.returncode}")
            part.process = None
            part.start_at_s = now_s + RESTART_S
        if part.process is None and now_s >= part.start_at_s:
            part.process = subprocess.Popen(
                [sys.executable, *part.command(part.starts), "--config", str(part.config_file)],
                cwd=ROOT,
                env={
                    **self.environment,
                    lifeline.VARIABLE: str(self._read_end),
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=(self._read_end,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
            part.starts += 1
            assert part.process.stdout is not None
            self.log.read(part.process.stdout, part.name)

    def _write_config(self, name: str) -> Path:
        text = effective_config.as_toml(self.config_of(name))
        path = self.folder / f"{name.replace(' ', '-')}.toml"
        path.write_text(text, encoding="utf-8")
        return path


Tree = dict[str, dict[str, object]]


def _merged(text: str, different: Tree) -> Tree:
    tree: Tree = tomllib.loads(text)
    for section, values in different.items():
        tree[section].update(values)
    return tree


def _roles(ranks: int) -> dict[str, tuple[str, ...]]:
    workers = {f"rank {rank}": ("rank-worker", "--rank", str(rank)) for rank in range(ranks)}
    return {
        "scheduler": ("scheduler",),
        "store": ("cache-store",),
        **workers,
        "gateway": ("gateway",),
    }


def _plain(arguments: tuple[str, ...]) -> Command:
    return lambda _starts: ["-P", "-m", "services.commands.main", *arguments]
