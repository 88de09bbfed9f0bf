"""Roles started one by one, each with its own configuration.

This permits a proxy between two roles and other programs in place of a role. A role that ends is
restarted at once, as by launchd.
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
from tests.chaos.cluster.stack import ROOT, Stack, StackOptions

RESTART_S = 0.1
POLL_S = 0.02
END_DEADLINE_S = 10.0

Command = Callable[[int], list[str]]
"""Returns the arguments of the Python interpreter, given the number of earlier starts."""


@dataclasses.dataclass(slots=True)
class _Role:
    name: str
    command: Command
    config_file: Path
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    start_at_s: float = 0.0


class UnsupervisedStack(Stack):
    """Scheduler, store, ranks and gateway without a supervisor."""

    def __init__(
        self,
        options: StackOptions,
        commands: Mapping[str, Command] | None = None,
        roles: Collection[str] = (),
    ) -> None:
        """Prepare the roles; `launch` starts them.

        Args:
            options: size and settings.
            commands: other commands for some roles, by role name.
            roles: names of the only roles to start; empty: all.
        """
        super().__init__(options)
        replaced = dict(commands or {})
        self._roles = [
            _Role(name, replaced.get(name, _lockstep_command(arguments)), self._write_config(name))
            for name, arguments in _role_arguments(options.ranks).items()
            if not roles or name in roles
        ]
        self._lock = threading.Lock()
        self._is_ending = False
        self._restarter: threading.Thread | None = None
        self._read_end = self._write_end = -1

    def settings_of(self, name: str) -> dict[str, dict[str, object]]:
        """Return the settings of one role that differ from the shared ones, by section and key.

        Subclasses set the addresses of each role.
        """
        del name
        return {}

    def config_of(self, name: str) -> Config:
        """Return a role's complete configuration."""
        return config_from_tree(
            _merged(effective_config.as_toml(self.config), self.settings_of(name))
        )

    def launch(self) -> None:
        """Start all roles and restart each that ends."""
        self._read_end, self._write_end = os.pipe()
        os.set_inheritable(self._read_end, True)
        self._is_ending = False
        self._restarter = threading.Thread(
            target=self._restart_roles, name="restarter", daemon=True
        )
        self._restarter.start()

    def pids(self) -> dict[str, int]:
        """Return the pid of each running role."""
        with self._lock:
            return {
                role.name: role.process.pid
                for role in self._roles
                if role.process is not None and role.process.poll() is None
            }

    def starts(self, name: str) -> int:
        """Return how often a role was started."""
        return next(role.starts for role in self._roles if role.name == name)

    def end(self) -> None:
        """Kill all processes and wait for them."""
        if self._restarter is None:
            return
        self._is_ending = True
        self._restarter.join()
        self._restarter = None
        # Unreaped children of this process: their pids cannot belong to other processes.
        for role in self._roles:
            if role.process is not None:
                role.process.kill()
        for role in self._roles:
            if role.process is not None:
                role.process.wait(END_DEADLINE_S)
                role.process = None
        os.close(self._read_end)
        os.close(self._write_end)

    def _restart_roles(self) -> None:
        while not self._is_ending:
            with self._lock:
                for role in self._roles:
                    self._restart_if_ended(role, time.monotonic())
            time.sleep(POLL_S)

    def _restart_if_ended(self, role: _Role, now_s: float) -> None:
        if role.process is not None and role.process.poll() is not None:
            self.log.note(f"{role.name} exited with {role.process.returncode}")
            role.process = None
            role.start_at_s = now_s + RESTART_S
        if role.process is None and now_s >= role.start_at_s:
            role.process = subprocess.Popen(
                [sys.executable, *role.command(role.starts), "--config", str(role.config_file)],
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
            role.starts += 1
            assert role.process.stdout is not None
            self.log.read(role.process.stdout, role.name)

    def _write_config(self, name: str) -> Path:
        text = effective_config.as_toml(self.config_of(name))
        path = self.folder / f"{name.replace(' ', '-')}.toml"
        path.write_text(text, encoding="utf-8")
        return path


Tree = dict[str, dict[str, object]]


def _merged(text: str, changes: Tree) -> Tree:
    tree: Tree = tomllib.loads(text)
    for section, values in changes.items():
        tree[section].update(values)
    return tree


def _role_arguments(ranks: int) -> dict[str, tuple[str, ...]]:
    workers = {f"rank {rank}": ("rank-worker", "--rank", str(rank)) for rank in range(ranks)}
    return {
        "scheduler": ("scheduler",),
        "store": ("cache-store",),
        **workers,
        "gateway": ("gateway",),
    }


def _lockstep_command(arguments: tuple[str, ...]) -> Command:
    return lambda _starts: ["-P", "-m", "services.commands.main", *arguments]
