"""Real coding agents carry out a task on two real ranks, started by `lockstep launch`.

In `make clients` each agent meets each family of models; in `make proofs` each family meets one
agent with tools, in turn, and each agent at least one family.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.clients.agents.catalog import AGENTS, Agent
from tests.clients.agents.installation import TRANSCRIPTS, missing_requirement
from tests.clients.agents.isolation.relay import Exchange, Relay
from tests.clients.agents.session import Session
from tests.clients.model.families import HAS_ALL_PAIRS, Family, families
from tests.clients.scripted_ranks import ScriptedRanks, scripted_ranks

pytestmark = pytest.mark.proof
INSTALLED = [agent for agent in AGENTS if not missing_requirement(agent)]
CACHED_SHARE_MIN = 0.95
"""Part of the earlier conversation that must come from the cache."""


def _pairs() -> list[tuple[Family, Agent]]:
    """Return the families and agents that meet, in the order of the families."""
    if HAS_ALL_PAIRS:
        return [(family, agent) for family in families() for agent in INSTALLED]
    found: list[tuple[Family, Agent]] = []
    with_tools = [agent for agent in INSTALLED if agent.tools]
    others = [agent for agent in INSTALLED if not agent.tools]
    for number, family in enumerate(families()):
        found += [(family, agent) for agent in others]
        others = []
        if with_tools:
            found.append((family, with_tools[number % len(with_tools)]))
    return found


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedRanks]:
    """Two ranks with a model of one family that knows all clients' tasks."""
    family: Family = request.param
    with scripted_ranks(tmp_path_factory.mktemp(family.name), family, INSTALLED) as ranks:
        yield ranks


@pytest.fixture
def relay(ranks: ScriptedRanks, request: pytest.FixtureRequest) -> Iterator[Relay]:
    """Writes down what a client and the server say, for the report of a failure too.

    The first answer comes late, as that of a server which restarts its ranks.
    """
    with Relay.to(ranks.url, first_posts_delay_s=3.0) as relay:
        yield relay
        TRANSCRIPTS.mkdir(parents=True, exist_ok=True)
        (TRANSCRIPTS / f"{request.node.callspec.id}.txt").write_text(relay.transcript)
        print(relay.transcript)


def _turns(relay: Relay, agent: Agent) -> list[Exchange]:
    """Return the exchanges of the conversation, without a client's requests beside it."""
    asked = [exchange for exchange in relay.exchanges if exchange.method == "POST"]
    return [one for one in asked if one.request.get("tools") or agent.tools is None]


def _prompt_tokens(turn: Exchange) -> int:
    return turn.cached_tokens + turn.computed_tokens


@pytest.mark.parametrize(
    ("ranks", "agent"), list(_pairs()), indirect=["ranks"], ids=lambda one: one.name, scope="module"
)
def test_agent_reads_edits_runs_reports_and_its_next_turns_come_from_the_cache(
    ranks: ScriptedRanks, relay: Relay, agent: Agent, tmp_path: Path
) -> None:
    """The client calls its own tools in order, the file is changed, the report is shown, and each
    turn computes little more than its new messages."""
    # Without tools the file is a part of the prompt, and changes in it.
    cached_share_min = CACHED_SHARE_MIN if agent.tools else 0.5
    task = ranks.tasks[agent.name]
    session = Session(task, tmp_path / "home", relay, ranks.lockstep.port)

    assert task.report in session.begin()
    assert session.file.read_text() == f"{task.new}\n"
    turns = _turns(relay, agent)
    assert [name for turn in turns for name in turn.called] == task.called
    assert all(turn.status == 200 and turn.is_whole for turn in relay.exchanges)
    for earlier, turn in pairwise(turns):
        assert turn.cached_tokens >= cached_share_min * _prompt_tokens(earlier)

    assert task.reply in session.go_on()
    last = _turns(relay, agent)[-1]
    # Some templates drop earlier thoughts from a new question on, but nothing before them.
    assert last.cached_tokens >= cached_share_min * _prompt_tokens(turns[0])
