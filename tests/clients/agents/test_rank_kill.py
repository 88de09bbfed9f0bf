"""A rank dies in the middle of an agent's tool call, and the agent finishes its task.

The call of Codex is under a grammar then: its tool for patches has one, and the model would
misspell the end of the patch.
"""

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.agents.catalog import AGENTS, CODEX, Agent
from tests.clients.agents.installation import TRANSCRIPTS, missing_requirement
from tests.clients.agents.isolation.relay import Relay
from tests.clients.agents.session import Session
from tests.clients.model.families import Glm
from tests.clients.model.script import Call
from tests.clients.scripted_ranks import ScriptedRanks, scripted_ranks

pytestmark = pytest.mark.proof


def _misspelled(path: Path, old: str, new: str) -> Call:
    """Return a patch whose last letter is wrong; only one letter is right there."""
    assert CODEX.tools
    call = CODEX.tools.edit(path, old, new)
    return Call(call.name, {name: f"{text[:-1]}q" for name, text in call.arguments.items()})


def _agents() -> list[Agent]:
    """Return the installed agents with tools, and a model for Codex that errs."""
    assert CODEX.tools
    erring = dataclasses.replace(CODEX, tools=dataclasses.replace(CODEX.tools, edit=_misspelled))
    found = [agent for agent in AGENTS if agent.tools and not missing_requirement(agent)]
    return [erring if agent is CODEX else agent for agent in found]


INSTALLED = _agents()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedRanks]:
    """Two ranks with a model that knows all clients' tasks."""
    with scripted_ranks(tmp_path_factory.mktemp("killed"), Glm(), INSTALLED) as ranks:
        yield ranks


@pytest.mark.parametrize("agent", INSTALLED, ids=lambda agent: agent.name)
def test_agent_finishes_its_task_after_sigkill_of_a_rank_in_a_tool_call(
    ranks: ScriptedRanks, agent: Agent, tmp_path: Path
) -> None:
    """The client sees a pause: every answer is whole, no request is repeated, and the calls are
    those of a run without a fault; those under a grammar still follow it."""
    task = ranks.tasks[agent.name]
    before = ranks.lockstep.children()["rank-worker 1"]
    with Relay.to(ranks.url) as relay:
        # The old text is an argument of the call that edits the file.
        relay.when_answered(task.old, lambda: os.kill(before, signal.SIGKILL))
        session = Session(task, tmp_path / "home", relay, ranks.lockstep.port)
        try:
            assert task.report in session.begin()
        finally:
            TRANSCRIPTS.mkdir(parents=True, exist_ok=True)
            (TRANSCRIPTS / f"killed-rank-{agent.name}.txt").write_text(relay.transcript)
            print(relay.transcript)

    assert ranks.lockstep.children()["rank-worker 1"] != before
    assert session.file.read_text() == f"{task.new}\n"
    assert [name for one in relay.exchanges for name in one.called] == task.called
    assert all(one.status == 200 and one.is_whole for one in relay.exchanges)
