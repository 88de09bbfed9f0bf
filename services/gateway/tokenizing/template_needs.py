"""What a chat template demands of messages, found by trying it. Owns adapting messages to it.

No model is known by name: a small conversation is rendered in several spellings at the start.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any, Protocol

from services.gateway.conversation.conversation import INVALID_ARGUMENTS
from services.gateway.output.calls.header_calls import SHORT_ID_CHARS

Messages = list[dict[str, Any]]


class TryRender(Protocol):
    """Renderer of messages and tools."""

    def __call__(
        self, messages: Messages, tools: list[dict[str, Any]] | None, **arguments: Any
    ) -> str | None:
        """Return the text, None if the template refuses the messages.

        Args:
            messages: the messages.
            tools: the tools.
            arguments: further arguments of the template, by name.
        """
        ...


_USER = {"role": "user", "content": "first"}
_ANSWER = {"role": "assistant", "content": "second"}
_EMPTY_TURN = {"role": "assistant", "content": ""}
_LATE = "late instruction"
_KEY, _THOUGHT = "probe_key", "probe thought"
_VALUES = ("probe value", "probe other")
_RESULT = "probe result"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "Probe."}},
            "required": [],
        },
    },
}
_KEEPS_REASONING = (
    {"preserve_thinking": True},
    {"clear_thinking": False},
    {"drop_thinking": False},
    {"truncate_history_thinking": False},
)
"""Template arguments of several families that keep the reasoning of earlier turns."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclasses.dataclass(frozen=True)
class TemplateNeeds:
    """What a template demands."""

    joins_neighbours: bool = False
    """Two messages of one role in a row are refused."""
    has_system: bool = True
    """System messages are allowed at the start."""
    has_late_system: bool = True
    """System messages are allowed, and stay, between others."""
    has_text_arguments: bool = False
    """The arguments of calls are JSON as text; else they are objects."""
    has_short_ids: bool = False
    """Ids of calls have `SHORT_ID_CHARS` letters and digits."""
    reasoning_key: str = "reasoning_content"
    """Field of a message with its reasoning."""
    has_one_text: bool = False
    """A message with calls must not have both reasoning and text."""
    has_one_call: bool = False
    """A message with several calls is refused, or only its first call is written."""
    has_empty_turns: bool = True
    """Messages of the assistant without text and calls are allowed."""
    joined_to_results: frozenset[str] = frozenset()
    """Roles whose messages are refused right after a call's result: their text is added to it."""
    agent_arguments: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    """Template arguments by name that keep the reasoning of earlier turns, which agents need: with
    them a model works on as it began, and prompts begin as they did before."""

    def adapt(self, messages: Messages) -> Messages:
        """Return messages that mean the same and suit the template.

        Args:
            messages: dicts with `role`, `content` and the rest, as `template_messages` makes them.
        """
        names: dict[str, str] = {}
        adapted: Messages = []
        if self.has_one_call:
            messages = _with_single_calls(messages)
        if not self.has_empty_turns:
            messages = [message for message in messages if not _is_empty_turn(message)]
        for index, original in enumerate(messages):
            message = self._with_role(original, is_first=index == 0)
            if message.get("tool_calls"):
                for call in message["tool_calls"]:
                    names[call.get("id", "")] = call["function"]["name"]
                message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            answered = message.get("tool_call_id")
            if answered is not None:
                message.setdefault("name", names.get(answered, ""))
                message["tool_call_id"] = self._id(answered)
            self._move_reasoning(message)
            is_more_system = (
                original["role"] == "system"
                and not self.has_late_system
                and [one["role"] for one in adapted] == ["system"]
            )
            if is_more_system:
                message["role"] = "system"
            if adapted and self._joins(adapted[-1], message, is_more_system=is_more_system):
                adapted[-1] = _joined(adapted[-1], message)
            else:
                adapted.append(message)
        return adapted

    def _joins(
        self, first: dict[str, Any], second: dict[str, Any], *, is_more_system: bool
    ) -> bool:
        """Return whether two neighbours must be one message."""
        if first["role"] == "tool":
            return second["role"] in self.joined_to_results
        return (
            (self.joins_neighbours or is_more_system)
            and first["role"] == second["role"]
            and not first.get("tool_calls")
        )

    def _with_role(self, message: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        message = dict(message)
        may_stay = self.has_system if is_first else self.has_late_system
        if message["role"] == "system" and not may_stay:
            message["role"] = "user"
        return message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, dict):
            # Templates walk through the arguments, and would refuse the session from here on.
            arguments = {INVALID_ARGUMENTS: arguments}
        if self.has_text_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        return {**call, "id": self._id(call.get("id", "")), "function": function}

    def _id(self, call_id: str) -> str:
        fits = len(call_id) == SHORT_ID_CHARS and call_id.isalnum() and call_id.isascii()
        if not self.has_short_ids or fits:
            return call_id
        # Clients may send ids of another server; equal ones stay equal.
        return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_CHARS]

    def _move_reasoning(self, message: dict[str, Any]) -> None:
        reasoning = message.pop("reasoning_content", None)
        if reasoning is None:
            return
        if self.has_one_text and message.get("tool_calls") and message.get("content"):
            reasoning = f"{reasoning}\n\n{message['content']}".strip()
            message["content"] = ""
        message[self.reasoning_key] = reasoning


def find_needs(render: TryRender) -> TemplateNeeds:
    """Return what a template demands.

    Args:
        render: renders messages with the template.
    """
    if render([_USER], None) is None:
        return TemplateNeeds()
    system = {"role": "system", "content": "start"}
    has_system = render([system, _USER], None) is not None
    late = [_USER, _ANSWER, {"role": "system", "content": _LATE}, _USER]
    text = render([system, *late] if has_system else late, None) or ""
    has_late_system = text.find(_LATE) > text.find(_ANSWER["content"])
    needs = TemplateNeeds(
        joins_neighbours=render([_USER, _USER], None) is None,
        has_system=has_system,
        has_late_system=has_late_system,
    )
    if render(needs.adapt([_USER, _EMPTY_TURN, _USER]), None) is None:
        needs = dataclasses.replace(needs, has_empty_turns=False)
    needs = _with_call_spelling(needs, render)
    needs = _with_several_calls(needs, render)
    needs = _with_reasoning(needs, render)
    return _with_texts_after_results(needs, render)


def _accepts(render: TryRender, messages: Messages, *texts: str) -> bool:
    """Return whether a template accepts messages and writes these texts of them."""
    found = render(messages, [_TOOL])
    return found is not None and all(text in found for text in texts)


def _with_call_spelling(needs: TemplateNeeds, render: TryRender) -> TemplateNeeds:
    """Add how calls must be spelled; without a spelling that the template writes, nothing."""
    for has_text_arguments, has_short_ids in itertools.product((False, True), repeat=2):
        tried = dataclasses.replace(
            needs,
            has_text_arguments=has_text_arguments,
            has_short_ids=has_short_ids,
        )
        text = render(tried.adapt(_conversation()), [_TOOL])
        # An object that is written as Python's text of it is no JSON.
        if text is not None and _VALUES[0] in text and f"'{_KEY}'" not in text:
            return tried
    return needs


def _with_several_calls(needs: TemplateNeeds, render: TryRender) -> TemplateNeeds:
    """Add whether calls must stand in messages of their own, if that helps."""
    turns = _conversation(calls=len(_VALUES))
    if _accepts(render, needs.adapt(turns), *_VALUES):
        return needs
    tried = dataclasses.replace(needs, has_one_call=True)
    return tried if _accepts(render, tried.adapt(turns), *_VALUES) else needs


def _with_texts_after_results(needs: TemplateNeeds, render: TryRender) -> TemplateNeeds:
    """Add the roles that must not follow a call's result, if joining them to it helps."""
    for role in ("user", "system"):
        turns = [*_conversation(), {"role": role, "content": _LATE}, _ANSWER, _USER]
        if _accepts(render, needs.adapt(turns), _RESULT, _LATE):
            continue
        tried = dataclasses.replace(needs, joined_to_results=needs.joined_to_results | {role})
        if _accepts(render, tried.adapt(turns), _RESULT, _LATE):
            needs = tried
    return needs


def _with_reasoning(needs: TemplateNeeds, render: TryRender) -> TemplateNeeds:
    for key in _REASONING_KEYS:
        tried = dataclasses.replace(needs, reasoning_key=key)
        if _accepts(render, tried.adapt(_conversation(_THOUGHT)), _THOUGHT):
            spoken = _conversation(_THOUGHT, content="spoken")
            refused = not _accepts(render, tried.adapt(spoken))
            return dataclasses.replace(
                tried, has_one_text=refused, agent_arguments=_agent_arguments(tried, render)
            )
    return needs


def _agent_arguments(needs: TemplateNeeds, render: TryRender) -> dict[str, bool]:
    """Return the template arguments that keep reasoning which is dropped without them."""
    turns = needs.adapt([*_conversation(_THOUGHT), _ANSWER, _USER])
    if _THOUGHT in (render(turns, [_TOOL]) or _THOUGHT):
        return {}
    for arguments in _KEEPS_REASONING:
        if _THOUGHT in (render(turns, [_TOOL], **arguments) or ""):
            return arguments
    return {}


def _conversation(reasoning: str | None = None, content: str = "", calls: int = 1) -> Messages:
    """Return a conversation up to the results of calls."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    message["tool_calls"] = []
    results: Messages = []
    for number, value in enumerate(_VALUES[:calls]):
        call_id = f"call_012345678{number}"
        function = {"name": "probe", "arguments": {_KEY: value}}
        message["tool_calls"].append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": call_id, "content": _RESULT})
    return [_USER, message, *results]


def _is_empty_turn(message: dict[str, Any]) -> bool:
    """Return whether the assistant neither said nor called anything, as if it was cut off."""
    is_empty = not message.get("content") and not message.get("tool_calls")
    return message["role"] == "assistant" and is_empty


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    contents = filter(None, (first.get("content"), second.get("content")))
    # A call's result stays one with another message joined to it.
    fields = {**second, **first} if first["role"] == "tool" else {**first, **second}
    return {**fields, "content": "\n\n".join(contents)}


def _with_single_calls(messages: Messages) -> Messages:
    """Return the messages with one call in each, which stands before the result of the call."""
    found: Messages = []
    waiting: dict[str, dict[str, Any]] = {}
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            found.extend(waiting.values())
            answered = _answered(messages, index)
            turns = _split(message, sorted(calls, key=lambda call: answered.get(call["id"], -1)))
            # Calls without a result come first, and so does the text.
            count = sum(call["id"] not in answered for call in calls)
            found += turns[: count or 1]
            waiting = {turn["tool_calls"][0]["id"]: turn for turn in turns[count or 1 :]}
            continue
        if message.get("tool_call_id") in waiting:
            found.append(waiting.pop(message["tool_call_id"]))
        found.append(message)
    return [*found, *waiting.values()]


def _answered(messages: Messages, index: int) -> dict[str, int]:
    """Return where the results of a message's calls are, by the ids of the calls."""
    places: dict[str, int] = {}
    for place in range(index + 1, len(messages)):
        if messages[place].get("tool_calls"):
            break
        if messages[place]["role"] == "tool":
            places.setdefault(messages[place].get("tool_call_id", ""), place)
    return places


def _split(message: dict[str, Any], calls: list[dict[str, Any]]) -> Messages:
    """Return a message with several calls as one message for each; the first has the text."""
    bare = {"role": message["role"], "content": ""}
    heads = [message, *[bare] * (len(calls) - 1)]
    return [{**head, "tool_calls": [call]} for head, call in zip(heads, calls, strict=True)]
