"""Sessions of agents with the real gateway: each prompt begins with all tokens so far."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shared.messages import token_ids
from tests.cache_store.running_store import Peer, RunningStore
from tests.gateway import tiny_tokenizer
from tests.gateway.dialects.agents import Agent, ClaudeCode, Cline, Codex, Opencode
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import ready_status, reply_with
from tests.support.waiting import wait_until

_TURNS = 20
_TEMPLATE = (
    "{%- if messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '\\n\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\n' }}{%- endif %}"
    "{%- if tools %}"
    "{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    '{{- \'\\n</tools>\\nReturn <tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n'
    "</tool_call>' }}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}"
    "{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content }}"
    "{%- for tool_call in message.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + tool_call.function.name + \'", "arguments": \' }}'
    "{{- (tool_call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}"
    "{{- '\\n</tool_response><|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Qwen3's, shortened; it keeps the reasoning of earlier turns."""
_STATUS = ready_status(context_tokens_max=200_000)
_AGENTS: list[type[Agent]] = [ClaudeCode, Codex, Opencode, Cline]


def _written(turn: int) -> str:
    """Return what the model writes: calls in odd white space, without and with text, or text."""
    if turn % 7 == 6:
        return f"That is done, as far as step {turn} is concerned."
    options = f'{{"b": [1.0, null, true],  "a": "ü \\"{turn}\\""}}'
    arguments = f'{{"path": "src/file{turn}.py", "count": {turn}.0,  "options": {options}}}'
    call = f'<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>'
    thought = f"<think>\nI should look at file {turn}.\n</think>\n\n"
    text = ["", "", f"Next comes file {turn}.\n"][turn % 3]
    second = f"\n{call}" if turn % 5 == 4 else ""
    return f"{thought}{text}{call}{second}"


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # Every second word alone: not always as the tokenizer would cut the text.
    pieces = text.split(" ")
    parts = [pieces[0], *(f" {piece}" for piece in pieces[1:])]
    ids = [token for part in parts for token in tokenizer.encode(part).ids]
    return [*ids, *tokenizer.encode("<|im_end|>").ids]


@pytest.fixture(scope="module")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose template renders calls and reasoning."""
    folder = tiny_tokenizer.write_model_folder(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = _TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def agent_gateway(
    agent_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway with a long context."""
    run_dir = tmp_path_factory.mktemp("run")
    with RunningGateway.start(agent_model, run_dir, report=_STATUS) as running:
        yield running


@pytest.fixture
def store() -> Iterator[RunningStore]:
    """A real cache store process, in a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ls-") as home:
        running = RunningStore(Path(home))
        running.start()
        yield running
        running.close()


class _Session:
    """A session of an agent with the tokens that its next prompt must begin with."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.known: list[int] = []
        self._turn = 0

    def step(self, gateway: RunningGateway) -> None:
        """Let the agent and the model take a turn; check the prompt."""
        tokenizer = tiny_tokenizer.train()
        written = _ids(tokenizer, _written(self._turn))
        gateway.scheduler.reply = reply_with(written)
        self.agent.server = gateway
        self.agent.step()
        prompt = token_ids.unpack(gateway.scheduler.submitted[-1].prompt).tolist()
        assert prompt[: len(self.known)] == self.known, tokenizer.decode(prompt[-200:])
        self.known = [*prompt, *written]
        self._turn += 1


@pytest.mark.parametrize("agent_class", _AGENTS)
def test_each_prompt_of_an_agents_session_begins_with_all_tokens_so_far(
    agent_gateway: RunningGateway, agent_class: type[Agent]
) -> None:
    """Each of 20 prompts begins with the previous prompt and the tokens that the model wrote then.

    So only the new message has to be computed, and the rest of a block.
    """
    session = _Session(agent_class(agent_gateway))
    for _ in range(_TURNS):
        session.step(agent_gateway)


def _keep_turns(gateway: RunningGateway, store: RunningStore) -> None:
    """Wait until the gateway keeps turns in the store."""
    peer = Peer(store)
    peer.connect()
    before = peer.report().documents

    def is_kept() -> bool:
        _Session(Cline(gateway, f"Task {time.monotonic()}")).step(gateway)
        return peer.report().documents > before

    wait_until(is_kept, 20.0, poll_s=0.2, failure="the store keeps no turns")
    peer.close()


def test_session_goes_on_with_all_tokens_after_the_gateway_was_restarted(
    agent_model: Path, store: RunningStore
) -> None:
    """The new gateway finds the turns in the cache store; without a store it serves as well."""
    wait_until((store.run_dir / "store.sock").exists, 30.0, failure="the store does not listen")
    sessions: list[_Session] = []
    for _ in range(2):
        with RunningGateway.start(
            agent_model, store.run_dir, report=_STATUS, has_store=True
        ) as gateway:
            _keep_turns(gateway, store)
            sessions = sessions or [_Session(Codex(gateway))]
            for _ in range(6):
                sessions[0].step(gateway)
    store.kill()
    with RunningGateway.start(agent_model, store.run_dir, report=_STATUS, has_store=True) as last:
        sessions[0].known = []
        sessions[0].step(last)
        sessions[0].step(last)
