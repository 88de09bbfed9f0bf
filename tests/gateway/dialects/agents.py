"""Agents that talk to a gateway as real clients do: they send the whole conversation each time.

Each has its own spelling of what the model wrote: Claude Code, Codex, opencode and Cline as they
were recorded. An agent answers a tool call with a result, and any other answer with a question.
"""

import abc
import copy
import json
from collections.abc import Mapping
from typing import Any, Protocol

SYSTEM = "You are a careful agent. Read before you write, and test what you change. " * 12
TASK = "Mend the test."
_SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "count": {"type": "number"},
        "options": {"type": "object"},
    },
    "required": ["path"],
}
_TOOLS = [("read", "Read a file."), ("edit", "Change a file."), ("run", "Run a command.")]


def spelled_anew(arguments: str) -> str:
    """Return arguments as a client in JavaScript writes them: no white space, sorted keys, 1.0 as
    1."""
    return json.dumps(_plain(json.loads(arguments)), separators=(",", ":"), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


class Server(Protocol):
    """What an agent talks to."""

    def post(
        self, path: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        """POST JSON; return status, body and headers."""
        ...


class Agent(abc.ABC):
    """One session of a client."""

    name: str
    path: str

    def __init__(
        self, server: Server, task: str = TASK, system: str = SYSTEM, model: str = "tiny"
    ) -> None:
        """Begin a session.

        Args:
            server: the server; it may be replaced between two steps.
            task: the first message of the user.
            system: the client's instructions.
            model: the model's name.
        """
        self.server = server
        self.task = task
        self._system = system
        self._model = model
        self.requests = 0
        self._begin()

    @property
    def mark(self) -> str:
        """A word of the last message, which is in no earlier one."""
        return f"turn-{self.requests}-of-{self.name}"

    def step(self) -> dict[str, Any]:
        """Send the conversation, and add the model's answer and what follows it; return it."""
        body = {"model": self._model, **copy.deepcopy(self._body())}
        status, answer, self.headers = self.server.post(self.path, body)
        assert status == 200, answer
        self.requests += 1
        self._take(copy.deepcopy(answer))
        return answer

    def _result(self) -> str:
        return f"{self.mark}: " + "some text of a file, " * (self.requests % 5 + 1)

    def _question(self) -> str:
        return f"{self.mark}: is that all?"

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _body(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _take(self, answer: dict[str, Any]) -> None: ...


class Opencode(Agent):
    """Chat: sends reasoning back with calls, "" for no text, and spells arguments anew."""

    name = "opencode"
    path = "/v1/chat/completions"
    _keeps_reasoning = True
    _no_text: str | None = ""

    def _begin(self) -> None:
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": self.task},
        ]

    def _body(self) -> dict[str, Any]:
        tools = [
            {
                "type": "function",
                "function": {"name": name, "description": d, "parameters": _SCHEMA},
            }
            for name, d in _TOOLS
        ]
        return {"messages": self._messages, "tools": tools, "max_tokens": 4_000}

    def _take(self, answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        replayed = {"role": "assistant", "content": message["content"] or self._no_text}
        if self._keeps_reasoning and calls and message.get("reasoning_content"):
            replayed["reasoning_content"] = message["reasoning_content"]
        if calls:
            replayed["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": spelled_anew(call["function"]["arguments"]),
                    },
                }
                for call in calls
            ]
        self._messages.append(replayed)
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": self._result()}
            self._messages.append(result)
        if not calls:
            self._messages.append({"role": "user", "content": self._question()})


class Cline(Opencode):
    """Chat: drops reasoning, sends null for no text, and spells arguments anew."""

    name = "cline"
    _keeps_reasoning = False
    _no_text = None


class ClaudeCode(Agent):
    """Messages: content is a list or a text, marks for the cache move, a billing line changes."""

    name = "claude"
    path = "/v1/messages?beta=true"

    def _begin(self) -> None:
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": self.task}]

    def _body(self) -> dict[str, Any]:
        billing = (
            f"x-anthropic-billing-header: cc_version=2.1.330.{self.requests}; cc_entrypoint=x;"
        )
        mark = {"type": "ephemeral"}
        messages = copy.deepcopy(self._messages)
        last = messages[-1]
        if isinstance(last["content"], str):
            last["content"] = [{"type": "text", "text": last["content"]}]
        last["content"][-1]["cache_control"] = mark
        return {
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": self._system, "cache_control": mark},
            ],
            "messages": messages,
            "tools": [
                {"name": name, "description": text, "input_schema": _SCHEMA}
                for name, text in _TOOLS
            ],
            "max_tokens": 4_000,
        }

    def _take(self, answer: dict[str, Any]) -> None:
        content = answer["content"]
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = json.loads(spelled_anew(json.dumps(block["input"])))
        self._messages.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": self._result()}
            for block in content
            if block["type"] == "tool_use"
        ]
        self._messages.append({"role": "user", "content": results or self._question()})


class Codex(Agent):
    """Responses without storage: items come back, reasoning with `encrypted_content` null."""

    name = "codex"
    path = "/v1/responses"

    def _begin(self) -> None:
        self._items: list[dict[str, Any]] = [
            self._message("developer", "input_text", self._system),
            self._message("user", "input_text", self.task),
        ]

    def _message(self, role: str, kind: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    def _body(self) -> dict[str, Any]:
        tools = [
            {"type": "function", "name": name, "description": text, "parameters": _SCHEMA}
            for name, text in _TOOLS
        ]
        return {
            "input": self._items,
            "tools": tools,
            "store": False,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "b3b0c44e",
        }

    def _take(self, answer: dict[str, Any]) -> None:
        results = []
        for item in answer["output"]:
            kept = {"type", "role", "content", "summary", "call_id", "name", "arguments"}
            replayed = {name: value for name, value in item.items() if name in kept}
            if item["type"] == "reasoning":
                replayed["encrypted_content"] = None
            if item["type"] == "function_call":
                replayed["arguments"] = spelled_anew(item["arguments"])
                result = {"type": "function_call_output", "call_id": item["call_id"]}
                results.append({**result, "output": self._result()})
            self._items.append(replayed)
        self._items += results or [self._message("user", "input_text", self._question())]
