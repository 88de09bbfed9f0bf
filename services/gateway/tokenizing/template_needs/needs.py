"""What a chat template demands of messages. Owns adapting messages to it; tries no template."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from services.gateway.conversation.conversation import INVALID_ARGUMENTS, Call
from services.gateway.output.calls.call_format import CallFormat
from services.gateway.output.calls.header_calls import SHORT_ID_CHARS
from services.gateway.tokenizing.template_needs.single_calls import Messages, with_single_calls
from services.gateway.tokenizing.template_needs.text_place import TextPlace, take_texts


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
    has_thinking_parts: bool = False
    """The reasoning is a part of the content instead."""
    call_format: CallFormat | None = None
    """The template writes no calls, so they stand in the content as the model writes them."""
    text_place: TextPlace | None = None
    """Where a text beside calls belongs; None: the template writes it there."""
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

    def render(self, messages: Messages, write: Callable[[Messages], str]) -> str:
        """Return messages as the template writes them, with each text at its place.

        Args:
            messages: dicts as for `adapt`.
            write: renders messages with the template.
        """
        adapted = self.adapt(messages)
        if self.text_place is None:
            return write(adapted)
        bare, texts = take_texts(adapted)
        return self.text_place.put(write(bare), texts)

    def adapt(self, messages: Messages) -> Messages:
        """Return messages that mean the same and suit the template.

        Args:
            messages: dicts with `role`, `content` and the rest, as `template_messages` makes them.
        """
        names: dict[str, str] = {}
        adapted: Messages = []
        if self.has_one_call:
            messages = with_single_calls(messages)
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
        return [self._with_content(message) for message in adapted]

    def _with_content(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its calls or its reasoning in the content, if they belong there."""
        if self.call_format is not None and message.get("tool_calls"):
            message = dict(message)
            calls = [
                Call(call.get("id", ""), call["function"]["name"], call["function"]["arguments"])
                for call in message.pop("tool_calls")
            ]
            texts = (message.get("content"), self.call_format.write(calls))
            message["content"] = "\n".join(filter(None, texts))
        if self.has_thinking_parts and message.get(self.reasoning_key):
            message = dict(message)
            parts = [{"type": "thinking", "thinking": message.pop(self.reasoning_key)}]
            if message.get("content"):
                parts.append({"type": "text", "text": message["content"]})
            message["content"] = parts
        return message

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
        has_both = message.get("tool_calls") and message.get("content")
        if self.has_one_text and self.text_place is None and has_both:
            reasoning = f"{reasoning}\n\n{message['content']}".strip()
            message["content"] = ""
        message[self.reasoning_key] = reasoning


def _is_empty_turn(message: dict[str, Any]) -> bool:
    """Return whether the assistant neither said nor called anything, as if it was cut off."""
    is_empty = not message.get("content") and not message.get("tool_calls")
    return message["role"] == "assistant" and is_empty


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    contents = filter(None, (first.get("content"), second.get("content")))
    # A call's result stays one with another message joined to it.
    fields = {**second, **first} if first["role"] == "tool" else {**first, **second}
    return {**fields, "content": "\n\n".join(contents)}
