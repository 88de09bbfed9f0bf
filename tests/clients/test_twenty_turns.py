"""Sessions of 20 turns on two real ranks: how much of each prompt comes from the cache.

The clients send what Claude Code, Codex and opencode were recorded to send back. After half of the
turns every process is restarted with the same cache directory.
"""

import json
import re
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents.installation import TRANSCRIPTS
from tests.clients.model.families import Glm
from tests.clients.model.model_folder import write_model
from tests.clients.model.script import Call, Script, Step
from tests.clients.scripted_ranks import RANKS, SETTINGS
from tests.end_to_end.running_lockstep import RunningLockstep, running_lockstep
from tests.gateway.dialects.agents import SYSTEM, Agent, ClaudeCode, Codex, Opencode

pytestmark = pytest.mark.proof
TURNS = 20
CACHED_SHARE_MIN = 0.95
"""Part of the earlier conversation that must come from the cache."""
SYSTEM_COPIES = 20
"""Makes instructions of more than 8,000 tokens, half as long as those of the clients."""
EXIT_DEADLINE_S = 60.0
_CACHE = re.compile(r"(memory|ssd|computed)=(\d+)")
_AGENTS: list[type[Agent]] = [ClaudeCode, Codex, Opencode]


class _Server:
    """What an agent talks to: a gateway with real ranks."""

    def __init__(self, lockstep: RunningLockstep) -> None:
        self._lockstep = lockstep

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        """POST JSON; return status, body and headers."""
        status, content, headers = self._lockstep.exchange(path, body, timeout_s=120.0)
        return status, json.loads(content), {name.lower(): text for name, text in headers.items()}


class _Session:
    """A session of an agent, and the shares of its prompts that came from the cache."""

    def __init__(self, agent: Agent) -> None:
        self.name = agent.name
        self.shares: list[float] = []
        """For each turn after the first: cached tokens by those of the conversation so far."""
        self._agent = agent
        self._known_tokens = 0

    def take_turns(self, count: int, server: _Server) -> None:
        """Let the agent and the model take turns."""
        self._agent.server = server
        for _ in range(count):
            usage = self._agent.step()["usage"]
            places = dict(_CACHE.findall(self._agent.headers["x-lockstep-cache"]))
            computed, memory, ssd = (int(places[n]) for n in ("computed", "memory", "ssd"))
            if self._known_tokens:
                self.shares.append((memory + ssd) / self._known_tokens)
            written = usage.get("completion_tokens") or usage["output_tokens"]
            self._known_tokens = computed + memory + ssd + written

    def __str__(self) -> str:
        shares = " ".join(f"{share:.1%}" for share in self.shares)
        return f"{self.name}: {self._known_tokens:,} tokens, from the cache: {shares}"


def _step(name: str, turn: int) -> Step:
    """Return what the model writes in a turn: calls with and without text, or only text."""
    cue = f"turn-{turn}-of-{name}"
    thought = f"I should look at file {turn}."
    if turn % 7 == 6:
        return Step(cue, f"That is done, as far as file {turn} is concerned.", None, thought)
    # Clients in JavaScript sort these names, and write 1.0 as 1.
    options = {"b": [1.0, None, True], "a": f'ü "{turn}"'}
    arguments = {"path": f"src/file{turn}.py", "count": float(turn), "options": options}
    text = ["", "", f"Next comes file {turn}."][turn % 3]
    return Step(cue, text, Call("read", arguments), thought)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Iterator[_Server]]:
    """Two servers, one after the other, with the same model and the same cache directory."""
    model, run = tmp_path / "scripted", tmp_path / "run"
    model.mkdir()
    run.mkdir(mode=0o700)
    steps = [_step(agent.name, turn) for agent in _AGENTS for turn in range(TURNS)]
    write_model(model, Glm(), Script(steps))

    def start() -> Generator[_Server]:
        for _ in range(2):
            with running_lockstep(run, RANKS, "--model", str(model), settings=SETTINGS) as lockstep:
                yield _Server(lockstep)
                lockstep.interrupt()
                lockstep.process.wait(EXIT_DEADLINE_S)

    started = start()
    yield started
    started.close()


def test_each_of_20_turns_comes_from_the_cache_also_after_a_restart_of_all_processes(
    servers: Iterator[_Server],
) -> None:
    """At least 95 % of what the conversation was before the new message is not computed again."""
    system = SYSTEM * SYSTEM_COPIES
    sessions: list[_Session] = []
    for server in servers:
        sessions = sessions or [
            _Session(agent(server, f"turn-0-of-{agent.name}: mend the test.", system, "scripted"))
            for agent in _AGENTS
        ]
        with ThreadPoolExecutor(len(sessions)) as pool:
            for ended in [pool.submit(one.take_turns, TURNS // 2, server) for one in sessions]:
                ended.result()
    report = "\n".join(map(str, sessions))
    print(report)
    TRANSCRIPTS.mkdir(parents=True, exist_ok=True)
    (TRANSCRIPTS / "twenty-turns.txt").write_text(f"{report}\n")
    for session in sessions:
        assert len(session.shares) == TURNS - 1
        assert min(session.shares) >= CACHED_SHARE_MIN, str(session)
