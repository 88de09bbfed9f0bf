"""One conversation with a model, as all dialects mean it. Owns no dialect and no template."""

import dataclasses
from collections import Counter
from typing import Any, Literal

from services.gateway.conversation.constraint import Constraint
from services.gateway.http.errors import invalid_field

Role = Literal["system", "user", "assistant", "tool"]

INVALID_ARGUMENTS = "invalid_arguments"
"""Key under which the text of a call's arguments stands if it is no JSON object: an object stays
one, which every client and every template can read, and a tool's schema refuses it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model made earlier."""

    call_id: str
    name: str
    """Name of the tool."""
    arguments: Any
    """The arguments as an object, or as text if they are no JSON object."""


@dataclasses.dataclass(slots=True)
class ConversationMessage:
    """One message. Its parts that are no text have been refused or left out."""

    role: Role
    text: str = ""
    author: str | None = None
    """Name of its author, if the client gave one."""
    reasoning: str | None = None
    """What the model thought before it; only of an assistant's message."""
    calls: list[Call] = dataclasses.field(default_factory=list)
    """Tool calls of an assistant's message."""
    answers: str | None = None
    """Id of the call whose result a tool's message is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None: no parameters."""
    is_strict: bool = False
    """The arguments must match the schema."""
    text_form: Constraint | None = None
    """What the tool's only argument, a text, must match; None: any text. It is enforced in formats
    of calls that write texts without escapes."""
    param: str = "tools"
    """The request field with the schema, for errors."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether and which tools the model must call."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    """The tool to call, with `named`."""
    may_call_several: bool = True
    """One answer may have several calls."""
    param: str = "tool_choice"
    """The request field that says it, for errors."""


@dataclasses.dataclass(slots=True)
class Conversation:
    """Messages, tools and wishes of one request."""

    messages: list[ConversationMessage]
    tools: list[Tool] = dataclasses.field(default_factory=list)
    """Tools that are shown to the model."""
    tool_choice: ToolChoice = ToolChoice()
    template_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of the chat template, by name."""
    constraint: Constraint | None = None
    """What the text of the answer must match; None: any text."""
    deferred_tools: list[Tool] = dataclasses.field(default_factory=list)
    """Tools that the model may call too, but which only messages mention."""

    @property
    def callable_tools(self) -> list[Tool]:
        """All tools that the model may call."""
        return [] if self.tool_choice.mode == "none" else [*self.tools, *self.deferred_tools]

    @property
    def text_chars(self) -> int:
        """Characters of all messages."""
        return sum(len(message.text) for message in self.messages)

    def check_tools(self) -> None:
        """Refuse several tools of one name, and a tool choice that fits no tool.

        Raises:
            ApiError: 400 that names the request field.
        """
        counts = Counter(tool.name for tool in (*self.tools, *self.deferred_tools))
        for name, count in counts.items():
            if count > 1:
                raise invalid_field("tools", f"several tools have the name {name[:100]}.")
        choice = self.tool_choice
        if choice.mode == "required" and not counts:
            raise invalid_field(choice.param, "it requires tools.")
        if choice.mode == "named" and choice.name not in counts:
            raise invalid_field(choice.param, f"no tool has the name {choice.name[:100]}.")
