"""Writer of a completion's events. Owns which white space is layout and belongs to no event."""

from collections.abc import Callable

from services.gateway.output.code_spans import CodeSpans
from services.gateway.output.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    OutputEvent,
    Reasoning,
    Text,
)
from services.gateway.output.source import Source


class EventWriter:
    """Collects the events of one completion.

    White space around calls and reasoning is layout: it is held back until other text follows.
    """

    def __init__(self, new_id: Callable[[], str], source: Source) -> None:
        """Begin without events.

        Args:
            new_id: returns the id of a call that has none in the text.
            source: the completion's text. A text is written when its last character was just read.
        """
        self._new_id = new_id
        self._source = source
        self._events: list[OutputEvent] = []
        self._arguments: list[str] = []
        self._space: list[str] = []
        """White space after the last text or reasoning, which is held back."""
        self._space_places: list[range] = []
        """Where the white space after the last text stands in the completion."""
        self._text_places: list[list[range]] = []
        self._skips_newlines = False
        """Reasoning has ended, and line ends before the answer are layout."""
        self._is_new_block = True
        """No text of the present block of reasoning was written."""
        self._has_reasoning = False
        self.code = CodeSpans()
        """Code in the present text or reasoning."""
        self.call_count = 0
        """Calls begun so far."""
        self.is_fresh = True
        """No text was written since the start, the last call or the last reasoning."""

    @property
    def final_chars(self) -> int:
        """Characters of the completion before the white space that is held back."""
        return self._space_places[0].start if self._space_places else self._source.read_chars

    def take(self) -> list[OutputEvent]:
        """Remove and return the events so far."""
        if self._arguments:
            self._flush_arguments()
        events, self._events = self._events, []
        return events

    def take_text_places(self) -> list[list[range]]:
        """Remove and return where the text of each text event so far stands in the completion."""
        places, self._text_places = self._text_places, []
        return places

    def text(self, text: str) -> None:
        """Write a piece of the answer."""
        self.code.add(text)
        if self._skips_newlines:
            text = text.lstrip("\r\n")
            self._skips_newlines = not text
        kept = text.rstrip()
        end_chars = self._source.read_chars
        space_chars = end_chars - len(text) + len(kept)
        if kept:
            places = [*self._space_places, range(space_chars - len(kept), space_chars)]
            self._add_text("".join([*self._space, kept]), places)
            self.is_fresh = False
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])
            self._space_places.append(range(space_chars, end_chars))

    def reasoning(self, text: str) -> None:
        """Write a piece of reasoning."""
        self.code.add(text)
        if self._is_new_block:
            text = text.lstrip()
            if not text:
                return
            self._is_new_block = False
            # Several blocks are one field in most dialects.
            self._drop_space()
            if self._has_reasoning:
                self._space.append("\n\n")
            self._has_reasoning = True
        kept = text.rstrip()
        if kept:
            self._events.append(Reasoning("".join([*self._space, kept])))
            self._space.clear()
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def end_reasoning(self) -> None:
        """End a block of reasoning; the next one begins on a new line."""
        self.code = CodeSpans()
        self._drop_space()
        self._is_new_block = True
        self._skips_newlines = True
        self.is_fresh = True

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a call.

        Args:
            name: name of the tool.
            call_id: the call's id in the text, "" if it has none.
        """
        self.code = CodeSpans()
        self._drop_space()
        self._is_new_block = True
        self._skips_newlines = False
        self.is_fresh = True
        self._events.append(CallBegun(self.call_count, call_id or self._new_id(), name))
        self.call_count += 1

    def arguments(self, text: str) -> None:
        """Write a piece of the arguments of the call that was begun last."""
        self._arguments.append(text)

    def end_call(self) -> None:
        """End the call that was begun last."""
        self._flush_arguments()
        self._events.append(CallEnded())

    def end(self) -> None:
        """End the completion: white space that was held back is text, if it is no layout."""
        is_layout = self.call_count or (self._has_reasoning and self.is_fresh)
        if self._space and self._is_new_block and not is_layout:
            self._add_text("".join(self._space), self._space_places.copy())
        self._drop_space()

    def _add_text(self, text: str, places: list[range]) -> None:
        self._events.append(Text(text))
        self._text_places.append(places)
        self._drop_space()

    def _drop_space(self) -> None:
        self._space.clear()
        self._space_places.clear()

    def _flush_arguments(self) -> None:
        text = "".join(self._arguments)
        self._arguments.clear()
        if text:
            self._events.append(CallArguments(text))
