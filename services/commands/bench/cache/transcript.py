"""Generated session of a coding agent: instructions, tools, code, test logs and the agent's text.

The same arguments give the same conversation. Tool calls and results are plain text in the
messages, so that every server's chat template renders the same prompt.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Message = dict[str, Any]

SYSTEM_SHARE = 0.15
"""Share of all tokens that belong to instructions and tools."""
AGENT_SHARE = 0.2
"""Share of a turn's tokens that the agent writes, tool calls included; the rest are results."""

_NOUNS = ["block", "cache", "epoch", "gateway", "index", "ledger", "plan", "receipt", "row", "slot"]
_VERBS = ["admit", "commit", "drop", "evict", "find", "keep", "merge", "read", "send", "verify"]
_TOOLS = ["read_file", "write_file", "edit_file", "list_files", "search", "run_tests"]


class Transcript:
    """A conversation of several turns; each request repeats all earlier messages."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        """The system's message, then user and assistant alternately; the last is the user's."""

    @property
    def turns(self) -> int:
        """Number of requests."""
        return len(self.messages) // 2

    def request(self, turn: int) -> list[Message]:
        """Return the messages of one request: all up to its last user message.

        Args:
            turn: number of the request, from 0.
        """
        return self.messages[: 2 * turn + 2]


def make_transcript(turns: int, tokens: int, seed: int, count: Callable[[str], int]) -> Transcript:
    """Return a session whose last request has about `tokens` tokens.

    Args:
        turns: number of requests.
        tokens: tokens of the last request, without those that a chat template adds.
        seed: sessions with different seeds differ from the first words on.
        count: returns the number of tokens of a text.
    """
    random = Random(seed)
    system_tokens = round(tokens * SYSTEM_SHARE)
    turn_tokens = (tokens - system_tokens) / turns
    messages: list[Message] = [
        _message("system", _filled(_instructions(seed), system_tokens, count))
    ]
    spent = count(messages[0]["content"])
    for turn in range(turns):
        until = system_tokens + round(turn_tokens * (turn + 1))
        if turn:
            agent_tokens = round(turn_tokens * AGENT_SHARE)
            text = _filled(_talk(random), agent_tokens, count) + _call(random)
            messages.append(_message("assistant", text))
            spent += count(text)
        first = [f"Make {_name(random)} faster. These are its files."] if turn == 0 else []
        lines = itertools.chain(first, _result(random))
        messages.append(_message("user", _filled(lines, until - spent, count)))
        spent += count(messages[-1]["content"])
    return Transcript(messages)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _filled(lines: Iterator[str], tokens: int, count: Callable[[str], int]) -> str:
    """Join lines until the text has `tokens` tokens or more."""
    text = next(lines)
    spent = count(text)
    while spent < tokens:
        line = "\n" + next(lines)
        text += line
        spent += count(line)
    return text


def _name(random: Random) -> str:
    return f"{random.choice(_VERBS)}_{random.choice(_NOUNS)}"


def _instructions(seed: int) -> Iterator[str]:
    yield f"Session {seed}: you are an agent that changes code. Read before you write."
    random = Random(seed)
    for tool in _TOOLS:
        yield json.dumps({"name": tool, "parameters": {"path": "string", "lines": "integer"}})
    while True:
        yield f"Never {_name(random)} before you {_name(random)}; say why in one sentence."


def _talk(random: Random) -> Iterator[str]:
    while True:
        yield f"The {random.choice(_NOUNS)} must {random.choice(_VERBS)} before {_name(random)}."


def _call(random: Random) -> str:
    call = {"name": random.choice(_TOOLS), "arguments": {"path": f"src/{_name(random)}.py"}}
    return f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _result(random: Random) -> Iterator[str]:
    """Yield lines of tool results: code, search results and test logs."""
    while True:
        yield f"# src/{_name(random)}.py"
        match random.randrange(3):
            case 0:
                yield f"def {_name(random)}({random.choice(_NOUNS)}: int) -> list[int]:"
                for _ in range(random.randint(3, 9)):
                    yield f"    {random.choice(_NOUNS)} = {_name(random)}({random.randrange(999)})"
                yield f"    return [{random.choice(_NOUNS)}]"
            case 1:
                for _ in range(random.randint(4, 12)):
                    yield f"src/{_name(random)}.py:{random.randrange(400)}: {_name(random)}()"
            case _:
                for _ in range(random.randint(4, 12)):
                    word = random.choice(["PASSED", "PASSED", "FAILED"])
                    yield f"tests/test_{_name(random)}.py::test_{_name(random)} {word}"
