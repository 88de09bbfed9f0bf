"""The SDKs of OpenAI and Anthropic carry out a task with tools of their own on two real ranks.

In `make clients` each dialect meets each family of models. In `make test` all dialects meet one
family, and in `make proofs`, where agents meet all families, each dialect meets one more.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.agents.catalog import Agent, Tools
from tests.clients.agents.isolation.relay import Relay
from tests.clients.model.families import (
    HAS_ALL_PAIRS,
    DeepSeekV3,
    Family,
    Gemma4,
    Glm,
    GptOss,
    Hermes,
    families,
)
from tests.clients.model.script import Call
from tests.clients.scripted_ranks import ScriptedRanks, scripted_ranks
from tests.clients.task import FILE, Task

MODEL = "scripted"
_SCHEMAS: dict[str, Any] = {
    name: {
        "type": "object",
        "properties": {word: {"type": "string"} for word in words},
        "required": words,
        "additionalProperties": False,
    }
    for name, words in {
        "read": ["path"],
        "edit": ["path", "old", "new"],
        "run": ["line"],
    }.items()
}
TOOLS = Tools(
    read=lambda path: Call("read", {"path": str(path)}),
    edit=lambda path, old, new: Call("edit", {"path": str(path), "old": old, "new": new}),
    run=lambda line: Call("run", {"line": line}),
)
ERRING_TOOLS = dataclasses.replace(
    TOOLS,
    # Of "new" only the last letter is wrong, and only one letter is right there.
    edit=lambda path, old, new: Call("edit", {"path": str(path), "old": old, "neq": new}),
)
TURNS_MAX = 8


def _use(name: str, arguments: dict[str, str]) -> str:
    """Do what a call says, and return its result."""
    if name == "run":
        return subprocess.run(
            arguments["line"], shell=True, check=True, capture_output=True, text=True
        ).stdout
    path = Path(arguments["path"])
    if name == "edit":
        path.write_text(path.read_text().replace(arguments["old"], arguments["new"]))
        return "The file is changed."
    return path.read_text()


class _Conversation:
    """What the loops of all dialects note."""

    def __init__(self, url: str, *, is_strict: bool = False) -> None:
        self.url = url
        self.is_strict = is_strict
        self.called: list[str] = []
        self.tokens: list[tuple[int, int]] = []
        """Of each request: tokens of its prompt, and how many of them came from the cache."""

    def result(self, name: str, arguments: Any) -> str:
        """Return the result of a call, whose arguments are an object or its JSON."""
        self.called.append(name)
        return _use(name, json.loads(arguments) if isinstance(arguments, str) else arguments)


def _chat(conversation: _Conversation, messages: list[Any], text: str) -> str:
    """Ask with Chat Completions, streamed, until the model calls no tool."""
    client = openai.OpenAI(base_url=f"{conversation.url}/v1", api_key="none", max_retries=0)
    rule = {"strict": True} if conversation.is_strict else {}
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema, **rule}}
        for name, schema in _SCHEMAS.items()
    ]
    messages.append({"role": "user", "content": text})
    with client:
        for _ in range(TURNS_MAX):
            with client.chat.completions.stream(
                model=MODEL,
                messages=messages,
                tools=tools,
                stream_options={"include_usage": True},
            ) as stream:
                completion = stream.get_final_completion()
            usage = completion.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached = usage.prompt_tokens_details.cached_tokens or 0
            conversation.tokens.append((usage.prompt_tokens, cached))
            message = completion.choices[0].message
            messages.append(message.to_dict())
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = conversation.result(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError(messages)


def _responses(conversation: _Conversation, items: list[Any], text: str) -> str:
    """Ask with Responses, streamed, until the model calls no tool."""
    client = openai.OpenAI(base_url=f"{conversation.url}/v1", api_key="none", max_retries=0)
    tools: Any = [
        {"type": "function", "name": name, "parameters": schema, "strict": False}
        for name, schema in _SCHEMAS.items()
    ]
    items.append({"role": "user", "content": text})
    with client:
        for _ in range(TURNS_MAX):
            with client.responses.stream(
                model=MODEL, input=items, tools=tools, store=False
            ) as stream:
                response = stream.get_final_response()
            usage = response.usage
            assert usage is not None
            cached = usage.input_tokens_details.cached_tokens
            conversation.tokens.append((usage.input_tokens, cached))
            items += [item.to_dict() for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for call in calls:
                output = conversation.result(call.name, call.arguments)
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": output}
                )
    raise AssertionError(items)


def _messages(conversation: _Conversation, messages: list[Any], text: str) -> str:
    """Ask with Messages, streamed, until the model calls no tool."""
    client = anthropic.Anthropic(base_url=conversation.url, api_key="none", max_retries=0)
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in _SCHEMAS.items()]
    messages.append({"role": "user", "content": text})
    with client:
        for _ in range(TURNS_MAX):
            with client.messages.stream(
                model=MODEL, max_tokens=2_000, messages=messages, tools=tools
            ) as stream:
                message = stream.get_final_message()
            usage = message.usage
            cached = usage.cache_read_input_tokens or 0
            created = usage.cache_creation_input_tokens or 0
            conversation.tokens.append((usage.input_tokens + cached + created, cached))
            messages.append(
                {"role": "assistant", "content": [b.to_dict() for b in message.content]}
            )
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in message.content if block.type == "text")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": conversation.result(call.name, call.input),
                }
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    raise AssertionError(messages)


LOOPS: dict[str, Callable[[_Conversation, list[Any], str], str]] = {
    "openai-chat": _chat,
    "openai-responses": _responses,
    "anthropic-messages": _messages,
}


def _agent(name: str, tools: Tools = TOOLS) -> Agent:
    """Return a client that has a task and no program: the loops of this module take its place."""
    return Agent(name, program="", binaries=(), begin=lambda _: (), go_on=lambda _: (), tools=tools)


FAMILIES: dict[Family, list[str]] = (
    {family: list(LOOPS) for family in families()}
    if HAS_ALL_PAIRS
    else {
        Hermes(): list(LOOPS),
        GptOss(): ["openai-responses"],
        DeepSeekV3(): ["anthropic-messages"],
        Gemma4(): ["openai-chat"],
    }
)
"""Families, and the dialects that each of them meets."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            family,
            id=family.name,
            marks=() if isinstance(family, Hermes) else pytest.mark.proof,
        )
        for family in FAMILIES
    ],
)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedRanks]:
    """Two ranks with a model of one family that knows the tasks of all dialects."""
    family: Family = request.param
    agents = [_agent(name) for name in LOOPS]
    with scripted_ranks(tmp_path_factory.mktemp(family.name), family, agents) as ranks:
        yield ranks


def test_sdk_carries_out_a_task_with_tools_and_goes_on_from_the_cache(ranks: ScriptedRanks) -> None:
    """The SDK reads every answer of the stream, the calls change the file, and each request
    computes only its new messages."""
    for name in FAMILIES[ranks.family]:
        _carry_out(ranks, name)


def _carry_out(ranks: ScriptedRanks, name: str) -> None:
    """Do a task with the SDK of a dialect; check calls, file and cached tokens."""
    task: Task = ranks.tasks[name]
    task.folder.mkdir()
    file = task.folder / FILE
    file.write_text(f"{task.old}\n")
    conversation = _Conversation(ranks.url)
    said: list[Any] = []

    assert LOOPS[name](conversation, said, task.request) == task.report
    assert file.read_text() == f"{task.new}\n"
    assert conversation.called == task.called
    # One template drops the tokens with which it opened an answer without thoughts.
    dropped = len("<|channel>thought\n<channel|>") if isinstance(ranks.family, Gemma4) else 0
    for (before, _), (_, cached) in pairwise(conversation.tokens):
        assert cached >= before - dropped

    assert LOOPS[name](conversation, said, task.question) == task.reply
    # Some templates drop earlier thoughts from a new question on, but nothing before them.
    assert conversation.tokens[-1][1] >= 0.95 * conversation.tokens[0][0]


@pytest.mark.proof
def test_sdk_with_strict_tools_finishes_its_task_after_sigkill_of_a_rank_in_a_call(
    tmp_path: Path,
) -> None:
    """The model would misspell an argument after the fault; the recovered grammar does not let
    it, and the client sees a pause."""
    agent = _agent("strict-sdk", ERRING_TOOLS)
    with scripted_ranks(tmp_path, Glm(), [agent]) as ranks, Relay.to(ranks.url) as relay:
        task = ranks.tasks[agent.name]
        task.folder.mkdir()
        file = task.folder / FILE
        file.write_text(f"{task.old}\n")
        rank = ranks.lockstep.children()["rank-worker 1"]
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        conversation = _Conversation(url, is_strict=True)
        # The old text is an argument of the call that edits the file, before the wrong letter.
        relay.when_answered(task.old, lambda: os.kill(rank, signal.SIGKILL))
        with relay.listening(listener):
            assert _chat(conversation, [], task.request) == task.report
        assert ranks.lockstep.children()["rank-worker 1"] != rank

    assert file.read_text() == f"{task.new}\n"
    assert conversation.called == task.called
    assert all(one.status == 200 and one.is_whole for one in relay.exchanges)
