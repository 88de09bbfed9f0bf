"""Output items of a response, made from the events of a completion. Owns their events for display.

One item is open at a time: an event of another kind closes it and opens the next. Streamed and
whole responses use the same items, so they are equal.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

import orjson

from services.gateway.dialects.responses.custom_input import CustomInput
from services.gateway.dialects.responses.item_ids import item_id
from services.gateway.dialects.responses.tools import Origin, Toolbox
from services.gateway.output.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    OutputEvent,
    Reasoning,
    Text,
)
from shared.errors import InvariantBroken

Json = dict[str, Any]
_NO_TOOL = Origin("function", "")
ItemStatus = Literal["in_progress", "completed", "incomplete"]


@dataclasses.dataclass(slots=True)
class _Open(abc.ABC):
    """An item that output is being added to."""

    item_type: ClassVar[str]

    item_id: str
    output_index: int
    pieces: list[str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """All text of the item so far."""
        return "".join(self.pieces)

    @abc.abstractmethod
    def item(self, status: ItemStatus) -> Json:
        """Return the item with the output so far."""

    @abc.abstractmethod
    def begin(self) -> list[Json]:
        """Return the events after `response.output_item.added`."""

    @abc.abstractmethod
    def add(self, text: str) -> list[Json]:
        """Add text and return its events."""

    def idle(self) -> list[Json]:
        """Return an event that changes nothing; [] if items of this kind have none."""
        return self.add("")

    @abc.abstractmethod
    def close(self) -> list[Json]:
        """Return the events before `response.output_item.done`."""

    def event(self, kind: str, **fields: Any) -> Json:
        """Return an event about this item."""
        place = {"item_id": self.item_id, "output_index": self.output_index}
        return {"type": f"response.{kind}", **place, **fields}


@dataclasses.dataclass(slots=True)
class _OpenMessage(_Open):
    """A message with one part of text."""

    item_type = "message"

    logprobs: list[Any] = dataclasses.field(default_factory=list)
    """Log probabilities of its tokens as JSON."""

    def item(self, status: ItemStatus) -> Json:
        content = [self._part(self.text)] if status != "in_progress" else []
        return {
            "id": self.item_id,
            "type": self.item_type,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def begin(self) -> list[Json]:
        return [self.event("content_part.added", content_index=0, part=self._part(""))]

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> list[Json]:
        self.pieces.append(text)
        self.logprobs += logprobs
        delta = {"content_index": 0, "delta": text, "logprobs": list(logprobs)}
        return [self.event("output_text.delta", **delta)]

    def close(self) -> list[Json]:
        text = self.text
        return [
            self.event("output_text.done", content_index=0, text=text, logprobs=self.logprobs),
            self.event("content_part.done", content_index=0, part=self._part(text)),
        ]

    def _part(self, text: str) -> Json:
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


@dataclasses.dataclass(slots=True)
class _OpenReasoning(_Open):
    """Reasoning, in the content of the item or, if the client asked for it, in its summary."""

    item_type = "reasoning"

    is_summary: bool = False

    def item(self, status: ItemStatus) -> Json:
        parts = [self._part(self.text)] if status != "in_progress" else []
        content = {"summary": parts} if self.is_summary else {"summary": [], "content": parts}
        return {
            "id": self.item_id,
            "type": self.item_type,
            "status": status,
            **content,
            "encrypted_content": None,
        }

    def begin(self) -> list[Json]:
        return [self._about(f"{self._part_kind}.added", part=self._part(""))]

    def add(self, text: str) -> list[Json]:
        self.pieces.append(text)
        return [self._about(f"{self._text_kind}.delta", delta=text)]

    def close(self) -> list[Json]:
        text = self.text
        return [
            self._about(f"{self._text_kind}.done", text=text),
            self._about(f"{self._part_kind}.done", part=self._part(text)),
        ]

    @property
    def _part_kind(self) -> str:
        return "reasoning_summary_part" if self.is_summary else "content_part"

    @property
    def _text_kind(self) -> str:
        return "reasoning_summary_text" if self.is_summary else "reasoning_text"

    def _about(self, kind: str, **fields: Any) -> Json:
        number = "summary_index" if self.is_summary else "content_index"
        return self.event(kind, **{number: 0}, **fields)

    def _part(self, text: str) -> Json:
        return {"type": "summary_text" if self.is_summary else "reasoning_text", "text": text}


@dataclasses.dataclass(slots=True)
class _OpenCall(_Open):
    """A call of a function, or of the client's search for tools."""

    item_type = "function_call"

    call_id: str = ""
    origin: Origin = _NO_TOOL

    def item(self, status: ItemStatus) -> Json:
        fields: Json = {"id": self.item_id, "type": self.item_type, "status": status}
        fields |= {"call_id": self.call_id, "name": self.origin.name, "arguments": self.text}
        if self.origin.namespace is not None:
            fields["namespace"] = self.origin.namespace
        return fields

    def begin(self) -> list[Json]:
        return []

    def add(self, text: str) -> list[Json]:
        self.pieces.append(text)
        return [self.event("function_call_arguments.delta", delta=text)]

    def close(self) -> list[Json]:
        if not self.text:
            # A call without arguments has an empty object, which clients parse.
            self.pieces.append("{}")
        fields = {"name": self.origin.name, "arguments": self.text}
        return [self.event("function_call_arguments.done", **fields)]


@dataclasses.dataclass(slots=True)
class _OpenSearch(_OpenCall):
    """A search for further tools, which the client executes; it has no events of its own."""

    item_type = "tool_search_call"

    def item(self, status: ItemStatus) -> Json:
        return {
            "id": self.item_id,
            "type": self.item_type,
            "status": status,
            "execution": "client",
            "call_id": self.call_id,
            "arguments": _parsed(self.text),
        }

    def add(self, text: str) -> list[Json]:
        self.pieces.append(text)
        return []

    def close(self) -> list[Json]:
        return []


@dataclasses.dataclass(slots=True)
class _OpenCustomCall(_OpenCall):
    """A call of a custom tool: its input is taken out of the arguments while they arrive."""

    item_type = "custom_tool_call"

    input: CustomInput = dataclasses.field(default_factory=CustomInput)

    def item(self, status: ItemStatus) -> Json:
        fields: Json = {"id": self.item_id, "type": self.item_type, "status": status}
        fields |= {"call_id": self.call_id, "name": self.origin.name, "input": self.text}
        if self.origin.namespace is not None:
            fields["namespace"] = self.origin.namespace
        return fields

    def add(self, text: str) -> list[Json]:
        return self._delta(self.input.push(text))

    def idle(self) -> list[Json]:
        return [self.event("custom_tool_call_input.delta", delta="")]

    def close(self) -> list[Json]:
        last = self._delta(self.input.finish())
        return [*last, self.event("custom_tool_call_input.done", input=self.text)]

    def _delta(self, text: str) -> list[Json]:
        if not text:
            return []
        self.pieces.append(text)
        return [self.event("custom_tool_call_input.delta", delta=text)]


_O = TypeVar("_O", bound=_Open)
_CALLS = {"function": _OpenCall, "custom": _OpenCustomCall, "tool_search": _OpenSearch}


class OutputItems:
    """The items of one response, and the events that display them while they grow."""

    def __init__(self, response_id: str, toolbox: Toolbox, *, has_summaries: bool) -> None:
        """Begin without items.

        Args:
            response_id: id of the response, from which the ids of its items are made.
            toolbox: the request's tools.
            has_summaries: reasoning goes to the summary of its item.
        """
        self.done: list[Json] = []
        """The finished items, in order."""
        self._response_id = response_id
        self._toolbox = toolbox
        self._has_summaries = has_summaries
        self._open: _Open | None = None

    def add(self, event: OutputEvent, logprobs: Sequence[Any] = ()) -> list[Json]:
        """Add an event of the completion.

        Args:
            event: the event.
            logprobs: for text, log probabilities of its tokens as JSON.

        Returns:
            The events for display, without their numbers.
        """
        match event:
            case Text(text=text):
                found, message = self._opened(_OpenMessage)
                return found + message.add(text, logprobs)
            case Reasoning(text=text):
                found, reasoning = self._opened(_OpenReasoning, is_summary=self._has_summaries)
                return found + reasoning.add(text)
            case CallBegun():
                return self.close("completed") + self._begin_call(event)
            case CallArguments(text=text):
                if not isinstance(self._open, _OpenCall):
                    raise InvariantBroken("arguments without a call")
                return self._open.add(text)
            case CallEnded():
                return self.close("completed")

    @property
    def has_open(self) -> bool:
        """Output is being added to an item."""
        return self._open is not None

    def idle(self) -> list[Json]:
        """Return an event without effect about the open item; [] without one."""
        return [] if self._open is None else self._open.idle()

    def close(self, status: ItemStatus) -> list[Json]:
        """Finish the open item, if there is one, and return its last events."""
        closed, self._open = self._open, None
        if closed is None:
            return []
        found = closed.close()
        item = closed.item(status)
        self.done.append(item)
        return [*found, _about_item("done", closed.output_index, item)]

    def _opened(self, kind: type[_O], **fields: Any) -> tuple[list[Json], _O]:
        """Return the open item, which is of this kind, and the events that opened it."""
        if isinstance(self._open, kind):
            return [], self._open
        found = self.close("completed")
        opened = kind(self._next_id(kind), len(self.done), **fields)
        return found + self._start(opened), opened

    def _begin_call(self, begun: CallBegun) -> list[Json]:
        origin = self._toolbox.origin(begun.name)
        kind = _CALLS[origin.kind]
        place = self._next_id(kind), len(self.done)
        return self._start(kind(*place, call_id=begun.call_id, origin=origin))

    def _start(self, opened: _Open) -> list[Json]:
        self._open = opened
        added = _about_item("added", opened.output_index, opened.item("in_progress"))
        return [added, *opened.begin()]

    def _next_id(self, kind: type[_Open]) -> str:
        return item_id(self._response_id, kind.item_type, str(len(self.done)))


def _about_item(end: str, output_index: int, item: Json) -> Json:
    return {
        "type": f"response.output_item.{end}",
        "output_index": output_index,
        "item": item,
    }


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
