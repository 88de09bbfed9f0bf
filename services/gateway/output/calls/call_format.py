"""Format of tool calls. Owns what all formats have in common; knows no grammar."""

import abc
import enum
import json
import secrets
from collections.abc import Sequence
from typing import Any

from services.gateway.conversation.conversation import Call, Tool
from services.gateway.output.argument_types import ANY, Types, argument_types
from services.gateway.output.arguments_text import ArgumentsText
from services.gateway.output.event_writer import EventWriter
from services.gateway.output.source import Markers, Reading, Source
from shared.log import Log

_log = Log("gateway.output")


class NotCallError(Exception):
    """What began like a call is text. The parser of the completion handles it."""


class Place(enum.Enum):
    """Where in a completion the marker of calls stands."""

    ANSWER = enum.auto()
    ASIDE = enum.auto()
    """In reasoning or in a block of code: models make calls there now and then, but they also
    write about them."""
    QUOTED = enum.auto()
    """In quotes of code, right after the backticks: models only write about calls there."""


class CallContext:
    """Where a format reads calls from and writes them to, for one completion.

    A call of a known tool in the answer is sent while it arrives. Any other is held until it is
    whole, because a model that explains the format writes the same: if it breaks, it is text.
    """

    def __init__(
        self, source: Source, writer: EventWriter, tools: list[Tool], format_name: str
    ) -> None:
        """Store the parts.

        Args:
            source: the completion's text.
            writer: receives the calls.
            tools: the tools that the model may call.
            format_name: name of the format, for the log.
        """
        self.source = source
        self.writer = writer
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self._format_name = format_name
        self._called: dict[str, Any] | None = None
        self._arguments = ArgumentsText(self._pass_on)
        self._begun = ("", "")
        self._held: list[str] | None = None
        """Arguments of a call that may still become text; None: they are sent."""
        self._has_warned = False
        self.place = Place.ANSWER
        """Where the marker of the calls stands that are read."""
        self.skipped = ""
        """Text that was read after the call's last argument and belongs to nothing."""

    def knows(self, name: str) -> bool:
        """Return whether the model may call a tool of this name."""
        return name in self._parameters

    @property
    def is_broken(self) -> bool:
        """Whether the begun call's arguments did not fit."""
        return self._arguments.is_broken

    def begin(self, name: str, call_id: str = "", *, is_certain: bool = False) -> None:
        """Begin a call.

        Args:
            name: name of the tool.
            call_id: the call's id in the text, "" if it has none.
            is_certain: nothing but a call can be here, so its tool and its place do not matter.

        Raises:
            NotCallError: when the model only writes about calls.
        """
        self._called = self._parameters.get(name)
        self._arguments = ArgumentsText(self._pass_on)
        self._begun = (name, call_id)
        self._held = None
        self.skipped = ""
        if is_certain or (self.place is Place.ANSWER and self.knows(name)):
            self._send_start()
        elif self.place is Place.QUOTED or (self.place is Place.ASIDE and not self.knows(name)):
            raise NotCallError
        else:
            self._held = []

    def write(self, text: str) -> None:
        """Write a piece of the begun call's arguments."""
        self._arguments.add(text)

    def break_off(self, ends: Markers, problem: str) -> Reading[str]:
        """Read the rest of a call that does not follow its format, as the text of an argument.

        Args:
            ends: the markers up to which it is read.
            problem: the difference, for the log.

        Returns:
            The marker, which was read; "" if the text ended. Arguments that were cut off there
            stay incomplete.

        Raises:
            NotCallError: when the call becomes text.
        """
        if not (yield from self.source.peek()):
            return ""
        self.warn(problem)
        self._arguments.break_off()
        return (yield from self.source.until(ends, self.write))

    def skip(self, ends: Markers) -> Reading[str]:
        """Read up to a marker and return it; "" if the text ended.

        The text before it is dropped, or stays text after the call if there is no marker.

        Args:
            ends: the markers.

        Raises:
            NotCallError: when the call becomes text.
        """
        pieces: list[str] = []
        if self._held is None:
            # It may become text, of which the places must not pass for settled.
            self.source.record()
        marker = yield from self.source.until(ends, pieces.append)
        text = "".join(pieces)
        if text.strip():
            self.warn("text stands between the arguments")
        if self._held is None:
            self.source.recorded()
        self.skipped = "" if marker else text
        return marker

    def end(self) -> None:
        """End the call; text that is read from now on stays text, unless it is taken as layout.

        Raises:
            NotCallError: when the call becomes text.
        """
        if self._held is not None and not self._arguments.is_whole:
            raise NotCallError
        self._arguments.end()
        if self._held is not None:
            pieces, self._held = self._held, None
            self._send_start()
            self._pass_on("".join(pieces))
        if self.is_broken:
            self.warn("the arguments are no JSON object")
        self.writer.end_call()
        self.source.record(self.skipped)
        self.skipped = ""
        self.place = Place.ANSWER

    def _send_start(self) -> None:
        # The text of a call that is sent can no longer become text of the answer.
        self.source.recorded()
        self.writer.begin_call(*self._begun)

    def _pass_on(self, text: str) -> None:
        if self._held is None:
            self.writer.arguments(text)
        else:
            self._held.append(text)

    def take_layout(self) -> None:
        """Drop the text that was read since the last call ended, or calls without one in them."""
        if self.place is not Place.QUOTED:
            self.source.recorded()

    def types(self, name: str) -> Types:
        """Return the types that an argument of the begun call may have."""
        return argument_types(self._called, name) if self._called else ANY

    def argument_names(self) -> list[str]:
        """Return the names of the begun call's arguments in the order of its schema."""
        properties = (self._called or {}).get("properties")
        return list(properties) if isinstance(properties, dict) else []

    def warn(self, problem: str) -> None:
        """Log once that a call does not follow its format.

        Args:
            problem: the difference, for the log.

        Raises:
            NotCallError: when the call becomes text.
        """
        if self._held is not None:
            raise NotCallError
        if not self._has_warned:
            self._has_warned = True
            _log.warning("tool_call_broken", format=self._format_name, problem=problem)


class CallFormat(abc.ABC):
    """Grammar of tool calls in a model's text. Stateless: one serves all completions."""

    openings: tuple[str, ...] = ()
    """Markers at which calls begin."""
    special_texts: tuple[str, ...] = ()
    """Further texts of the format that may be special tokens."""
    text_opening: str = ""
    text_closing: str = ""
    """What the model writes around a text before a call."""

    @abc.abstractmethod
    def read(self, opening: str, context: CallContext) -> Reading[None]:
        """Read the calls after an opening marker.

        Returns at the end of the calls, or at the first character that does not fit before a
        name is complete; the text that was read then stays text.

        Args:
            opening: the marker, which was read.
            context: reads the text and receives the calls.

        Raises:
            NotCallError: when the text that was read since the last call is no call.
        """

    def read_bare(self, context: CallContext) -> Reading[None]:
        """Read calls that begin without a marker at the start of an answer, if there are any.

        Most formats have none.

        Args:
            context: as for `read`.
        """
        del context
        yield from ()

    @abc.abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """Return calls of one turn as the model writes them; `read` reads them back.

        Args:
            calls: the calls, whose arguments are objects.
        """

    def new_id(self) -> str:
        """Return the id of a call that has none in the text."""
        return random_id()


def written_json(value: Any) -> str:
    """Return a value as JSON in the layout that models write."""
    return json.dumps(value, ensure_ascii=False)


def random_id() -> str:
    """Return an id that no other call has."""
    return f"call_{secrets.token_hex(12)}"
