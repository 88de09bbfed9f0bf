"""The requests of Open WebUI, as its source makes them, on two real ranks.

Installing Open WebUI takes gigabytes. Beside each chat it asks the same model for a title, tags
and follow-up questions, with the chat in one user message.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.clients.agents.catalog import Agent, Tools
from tests.clients.model.families import Hermes
from tests.clients.model.script import Call
from tests.clients.scripted_ranks import ScriptedRanks, scripted_ranks
from tests.clients.task import Task

pytestmark = pytest.mark.proof
MODEL = "scripted"
CHAT = "/v1/chat/completions"
_TOOLS = Tools(
    read=lambda path: Call("read_note", {"path": str(path)}),
    edit=lambda path, old, new: Call("change_note", {"path": str(path), "from": old, "to": new}),
    run=lambda line: Call("run_code", {"code": line}),
)
WEBUI = Agent(
    name="open-webui",
    program="open-webui",
    binaries=(),
    begin=lambda _: (),
    go_on=lambda _: (),
    tools=_TOOLS,
)
_OFFERED = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    for name in ("read_note", "change_note", "run_code")
]
BACKGROUND = ("Generate a concise title", "Generate 1-3 broad tags", "Suggest 3-5 questions")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedRanks]:
    """Two ranks with a model that knows the task."""
    with scripted_ranks(tmp_path_factory.mktemp("webui"), Hermes(), [WEBUI]) as ranks:
        yield ranks


def _turn(ranks: ScriptedRanks, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the pieces of a streamed turn make, put together as it does."""
    body = {
        "model": MODEL,
        "messages": messages,
        "tools": _OFFERED,
        "stream_options": {"include_usage": True},
    }
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for event in ranks.lockstep.stream(CHAT, body):
        for choice in event["choices"] if event != "[DONE]" else []:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls") or []:
                if piece["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(piece)
                else:
                    known = message["tool_calls"][piece["index"]]["function"]
                    known["arguments"] += piece["function"]["arguments"]
    return message


def _background(ranks: ScriptedRanks, wish: str, task: Task) -> str:
    """Return the answer to one of the requests beside the chat."""
    text = f"### Task:\n{wish}.\n### Chat History:\n<chat_history>\nUSER: {task.request}\n"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{text}</chat_history>"}],
        "stream": False,
        "max_completion_tokens": 1_000,
    }
    answer: str = ranks.lockstep.post(CHAT, body)["choices"][0]["message"]["content"]
    return answer


def test_open_webui_chats_with_tools_while_its_background_tasks_run(ranks: ScriptedRanks) -> None:
    """The chat comes to its end by tool calls, and each request beside it gets an answer of its
    own."""
    task = ranks.tasks[WEBUI.name]
    results = iter([f"{task.old}\n", "changed", f"{task.new.upper()}\n"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.request}]
    called: list[str] = []
    with ThreadPoolExecutor(len(BACKGROUND)) as pool:
        answers = [pool.submit(_background, ranks, wish, task) for wish in BACKGROUND]
        while (message := _turn(ranks, messages))["tool_calls"]:
            messages.append(message)
            for call in message["tool_calls"]:
                called.append(call["function"]["name"])
                result = {"role": "tool", "tool_call_id": call["id"], "content": next(results)}
                messages.append(result)

        assert message["content"] == task.report
        assert called == task.called
        assert [answer.result() for answer in answers] == ["A short title."] * len(BACKGROUND)
