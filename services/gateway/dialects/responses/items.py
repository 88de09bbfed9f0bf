"""Input items of a request as messages of a conversation. Owns their kinds; stores nothing.

Items that follow each other and come from the model (reasoning, a message, calls) are one message.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from services.gateway.conversation.conversation import Call, ConversationMessage, Role
from services.gateway.conversation.turns import joined_thoughts
from services.gateway.dialects.openai.request_types import ShortName
from services.gateway.dialects.responses.tools import (
    CUSTOM_ARGUMENT,
    TOOL_SEARCH,
    Toolbox,
    joined_name,
)
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field, unsupported

PARTS_MAX = 4_096
"""Most content parts of one item."""

Parts = Annotated[list[Any], Meta(max_length=PARTS_MAX)]
I = TypeVar("I", bound=Struct)  # noqa: E741 - the item's type

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_MEDIA_PARTS = ("input_image", "input_file", "input_audio", "image_url", "computer_screenshot")


class MessageItem(Struct):
    """A message; the only item whose `type` may be left out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts | None = None


class ReasoningItem(Struct):
    """What the model thought before the items after it."""

    content: str | Parts | None = None
    summary: Parts | None = None


class FunctionCallItem(Struct):
    """A call of a function that the model made."""

    call_id: ShortName
    name: ShortName
    arguments: str = "{}"
    namespace: ShortName | None = None


class CustomCallItem(Struct):
    """A call of a custom tool that the model made."""

    call_id: ShortName
    name: ShortName
    input: str = ""
    namespace: ShortName | None = None


class SearchCallItem(Struct):
    """A search for further tools that the model asked for."""

    call_id: ShortName | None = None
    arguments: Any = None


class CallResultItem(Struct):
    """The result of a call."""

    call_id: ShortName
    output: str | Parts | None = None


class SearchOutputItem(Struct):
    """The tools that a search has found; they may be called from then on."""

    call_id: ShortName | None = None
    tools: Parts = msgspec.field(default_factory=list)


class ItemReader:
    """Reader of the items of one request, in order."""

    def __init__(self, toolbox: Toolbox) -> None:
        """Begin without items.

        Args:
            toolbox: the request's tools, to which searches add the tools that they found.
        """
        self._toolbox = toolbox
        self.messages: list[ConversationMessage] = []
        self.ignored: dict[str, None] = {}
        """Names of left out parts, such as `input.web_search_call`, a set in order."""
        self._turn: ConversationMessage | None = None
        """The model's message to which its next item belongs."""
        self._texts: list[str] = []
        """Pieces of its text, joined once: there may be thousands."""
        self._thoughts: list[str] = []
        """Pieces of its reasoning."""
        self._ends_with_text = False
        """Its last item is a text."""
        self._calls: set[str] = set()
        self._param = ""

    def read(self, items: list[Any], name: Callable[[int], str]) -> None:
        """Add the messages of items.

        Args:
            items: the items, as their JSON was parsed.
            name: returns the path of an item by its index, for errors.

        Raises:
            ApiError: 400 for an item that is not valid, or a result without a call.
        """
        request_body.check_parts(
            text.encode(errors="replace")
            for item in items
            if isinstance(item, dict) and isinstance(text := item.get("arguments"), str)
        )
        for index, item in enumerate(items):
            self._param = name(index)
            if not isinstance(item, dict):
                raise invalid_field(self._param, "an item is an object.")
            self._read(item, str(item.get("type") or "message"))
        self._complete_turn()

    def _read(self, item: dict[str, Any], kind: str) -> None:
        match kind:
            case "message":
                self._add_message(self._convert(item, MessageItem))
            case "reasoning":
                self._add_reasoning(self._convert(item, ReasoningItem))
            case "function_call":
                call = self._convert(item, FunctionCallItem)
                arguments = request_body.decode_arguments(
                    call.arguments, f"{self._param}.arguments"
                )
                self._add_call(call.call_id, call.name, call.namespace, arguments)
            case "custom_tool_call":
                custom = self._convert(item, CustomCallItem)
                arguments = {CUSTOM_ARGUMENT: custom.input}
                self._add_call(custom.call_id, custom.name, custom.namespace, arguments)
            case "tool_search_call" if item.get("call_id"):
                search = self._convert(item, SearchCallItem)
                self._add_call(search.call_id or "", TOOL_SEARCH, None, search.arguments or {})
            case "function_call_output" | "custom_tool_call_output":
                output = self._convert(item, CallResultItem)
                text = self._text(output.output or "", f"{self._param}.output", may_have_media=True)
                self._add_output(output.call_id, text)
            case "tool_search_output" if item.get("call_id"):
                self._add_found_tools(self._convert(item, SearchOutputItem))
            case _:
                self.ignored[f"input.{kind[:64]}"] = None

    def _convert(self, item: dict[str, Any], kind: type[I]) -> I:
        return request_body.convert(item, kind, self._param)

    def _add_message(self, item: MessageItem) -> None:
        text = self._text(item.content or "", f"{self._param}.content")
        if item.role == "assistant":
            self._open_turn(is_text=True)
            if text:
                self._texts.append(text)
                self._ends_with_text = True
            return
        self._end_turn()
        role: Role = "user" if item.role == "user" else "system"
        self.messages.append(ConversationMessage(role, text))

    def _add_reasoning(self, item: ReasoningItem) -> None:
        text = self._text(item.content or [], f"{self._param}.content")
        text = text or self._text(item.summary or [], f"{self._param}.summary")
        if text:
            self._open_turn()
            self._thoughts.append(text)
            self._ends_with_text = False

    def _add_call(self, call_id: str, name: str, namespace: str | None, arguments: Any) -> None:
        request_body.check_depth(arguments, f"{self._param}.arguments")
        turn = self._open_turn()
        turn.calls.append(Call(call_id, joined_name(name, namespace), arguments))
        self._calls.add(call_id)

    def _add_output(self, call_id: str, text: str) -> None:
        if call_id not in self._calls:
            raise invalid_field(
                f"{self._param}.call_id",
                f"no earlier item is a call with the id {call_id[:100]}: send the call too, or "
                "the previous_response_id of the response that made it.",
            )
        self._end_turn()
        self.messages.append(ConversationMessage("tool", text, answers=call_id))

    def _add_found_tools(self, item: SearchOutputItem) -> None:
        found = self._toolbox.read(item.tools, f"{self._param}.tools", are_found=True)
        shown = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in found
        ]
        self._add_output(item.call_id or "", json.dumps(shown, ensure_ascii=False))

    def _open_turn(self, *, is_text: bool = False) -> ConversationMessage:
        """Return the model's message that takes the next item.

        An item after a call belongs to the turn of the call: templates want its result next. A text
        right after a text begins a new turn.

        Args:
            is_text: whether the item is a text.
        """
        if is_text and self._ends_with_text and self._turn is not None and not self._turn.calls:
            self._end_turn()
        if self._turn is None:
            self._turn = ConversationMessage("assistant")
            self.messages.append(self._turn)
        return self._turn

    def _end_turn(self) -> None:
        self._complete_turn()
        self._turn = None
        self._texts, self._thoughts = [], []
        self._ends_with_text = False

    def _complete_turn(self) -> None:
        """Write the pieces of the open turn into its message."""
        if self._turn is not None:
            self._turn.text = "".join(self._texts)
            self._turn.reasoning = joined_thoughts(self._thoughts)

    def _text(self, content: str | list[Any], param: str, *, may_have_media: bool = False) -> str:
        """Return the text of all parts.

        An image in a tool's result becomes a note for the model, because the client cannot take it
        back from its history; the user's own is refused.
        """
        if isinstance(content, str):
            return content
        pieces: list[str] = []
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _TEXT_PARTS or kind == "refusal":
                text = part.get("refusal" if kind == "refusal" else "text")
                if not isinstance(text, str):
                    raise invalid_field(f"{param}[{index}].text", "it must be a text.")
                pieces.append(text)
            elif kind in _MEDIA_PARTS:
                if not may_have_media:
                    raise unsupported(f"{param}[{index}].type", f"{kind}: only text is supported.")
                pieces.append(f"[{kind} left out: this model reads only text]")
            elif isinstance(kind, str):
                self.ignored[f"input.content.{kind[:64]}"] = None
            else:
                raise invalid_field(f"{param}[{index}]", "a part is an object with a type.")
        return "".join(pieces)
