"""A scripted model that two real ranks serve."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.clients.agents.catalog import Agent
from tests.clients.model.families import Family
from tests.clients.model.model_folder import write_model
from tests.clients.task import Task, script_of
from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep

RANKS = 2
SETTINGS = "[model]\ntrust_remote_code = true\n"
"""Content of the configuration file: the model's folder has its code."""


@dataclass(frozen=True)
class ScriptedRanks:
    """Two ranks with a model that knows the tasks of some clients."""

    family: Family
    lockstep: RunningLockstep
    tasks: dict[str, Task]
    """The task of each client by its name, with a folder that does not exist yet."""

    @property
    def url(self) -> str:
        """The gateway's URL."""
        return f"http://127.0.0.1:{self.lockstep.port}"


@contextlib.contextmanager
def scripted_ranks(folder: Path, family: Family, agents: list[Agent]) -> Iterator[ScriptedRanks]:
    """Serve a model of a family that can carry out the tasks of these clients.

    Args:
        folder: an empty folder.
        family: what the model is like.
        agents: the clients.
    """
    tasks = {agent.name: Task(agent, folder / agent.name) for agent in agents}
    model, run = folder / "scripted", folder / "run"
    model.mkdir()
    run.mkdir(mode=0o700)
    write_model(model, family, script_of(list(tasks.values())))
    with running_lockstep(run, RANKS, "--model", str(model), settings=SETTINGS) as running:
        yield ScriptedRanks(family, running, tasks)
