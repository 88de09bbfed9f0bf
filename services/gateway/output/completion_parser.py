"""Parser of one completion. Owns where reasoning begins and ends, and where calls may stand."""

import contextlib
import dataclasses

from services.gateway.conversation.conversation import Tool
from services.gateway.output.calls.call_format import (
    CallContext,
    CallFormat,
    NotCallError,
    Place,
    random_id,
)
from services.gateway.output.event_writer import EventWriter
from services.gateway.output.events import OutputEvent
from services.gateway.output.harmony import Harmony
from services.gateway.output.source import SPACE, Markers, Reading, Source, Write

AGAIN_CHARS_MAX = 262_144
"""Most characters of one completion that are read again, so that its time stays linear. What
is no call after that is text with all markers in it."""


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """Markers around what a model thinks."""

    opening: str
    closing: str
    is_certain: bool = False
    """The markers are special tokens, which a model never writes in an answer. Other markers count
    only where an answer begins, because a model may write about them."""
    special_texts: tuple[str, ...] = ()
    """Parts of the markers that may be special tokens."""

    def is_open(self, prompt_tail: str) -> bool:
        """Return whether a prompt ends inside reasoning, because its template begins with it.

        Args:
            prompt_tail: the end of the rendered prompt.
        """
        return prompt_tail.rstrip().endswith(self.opening.rstrip())


class CompletionParser:
    """Parser of one completion's text into text, reasoning and calls.

    The events do not depend on how the text is cut. Text that fits no format stays text.
    """

    def __init__(
        self,
        calls: CallFormat | Harmony | None,
        reasoning: ReasoningFormat | None,
        tools: list[Tool],
        prompt_tail: str,
        format_name: str = "",
    ) -> None:
        """Begin without text.

        Args:
            calls: format of the model's tool calls; None: calls are text.
            reasoning: format of its reasoning; None: reasoning is text.
            tools: the tools that the model may call.
            prompt_tail: end of the rendered prompt, in which reasoning may have begun.
            format_name: name of the format of the calls, for the log.
        """
        self._calls = calls if isinstance(calls, CallFormat) else None
        self._reasoning = reasoning
        self._source = Source()
        new_id = random_id if self._calls is None else self._calls.new_id
        self._writer = EventWriter(new_id, self._source)
        self._context = CallContext(self._source, self._writer, tools, format_name)
        self._again_chars_left = AGAIN_CHARS_MAX
        if isinstance(calls, Harmony):
            self._run = calls.read(
                self._context,
                prompt_tail,
                has_tools=bool(tools),
                has_reasoning=reasoning is not None,
            )
        else:
            is_open = reasoning is not None and reasoning.is_open(prompt_tail)
            self._run = self._read(is_thinking=is_open)
        next(self._run, None)

    @property
    def call_count(self) -> int:
        """Tool calls begun so far."""
        return self._writer.call_count

    @property
    def final_chars(self) -> int:
        """Characters at the completion's start from which no later event has text."""
        return min(self._source.final_chars, self._writer.final_chars)

    def push(self, text: str) -> list[OutputEvent]:
        """Add the next piece of text and return the events that later text cannot change.

        Args:
            text: the piece, with the special tokens that the format uses written out.
        """
        self._source.add(text)
        next(self._run, None)
        return self._writer.take()

    def finish(self) -> list[OutputEvent]:
        """Return the events of the text that was held back, at the end of the completion."""
        self._source.end()
        next(self._run, None)
        self._writer.end()
        return self._writer.take()

    def take_text_places(self) -> list[list[range]]:
        """Return where the text of each text event since the last call stands.

        Returns:
            For each event the positions of its characters in the completion, in order.
        """
        return self._writer.take_text_places()

    def _read(self, *, is_thinking: bool) -> Reading[None]:
        """Read the completion of a model whose reasoning and calls stand between markers."""
        writer = self._writer
        openings = () if self._calls is None else self._calls.openings
        closing = () if self._reasoning is None else (self._reasoning.closing,)
        in_reasoning = Markers(*closing, *openings)
        in_answer = Markers(
            *closing, *(() if self._reasoning is None else (self._reasoning.opening,)), *openings
        )
        if is_thinking:
            yield from self._skip_opening()
        else:
            yield from self._read_bare()
        while True:
            write = writer.reasoning if is_thinking else writer.text
            marker = yield from self._source.until(
                in_reasoning if is_thinking else in_answer, write
            )
            if not marker:
                return
            if marker in openings:
                if (yield from self._read_calls(marker, write, is_thinking=is_thinking)):
                    is_thinking = False
            elif marker in closing:
                if is_thinking or writer.is_fresh:
                    writer.end_reasoning()
                    is_thinking = False
                    yield from self._read_bare()
                else:
                    writer.text(marker)
            elif writer.is_fresh or (self._reasoning is not None and self._reasoning.is_certain):
                is_thinking = True
            else:
                writer.text(marker)

    def _skip_opening(self) -> Reading[None]:
        """Read the marker of reasoning that the model repeats, though the prompt has it."""
        assert self._reasoning is not None
        yield from self._source.run(SPACE)
        yield from self._source.take(self._reasoning.opening)

    def _read_calls(self, marker: str, write: Write, *, is_thinking: bool) -> Reading[bool]:
        """Read calls after their marker; return whether there was one. If not, it was text."""
        assert self._calls is not None
        before = self.call_count
        self._context.place = self._place(is_thinking=is_thinking)
        self._source.record(marker)
        with contextlib.suppress(NotCallError):
            yield from self._calls.read(marker, self._context)
        text = self._source.recorded()
        is_call = self.call_count > before
        if is_call:
            self._read_again(text, self._writer.text)
        else:
            self._read_again(text, write, marker)
        return is_call

    def _place(self, *, is_thinking: bool) -> Place:
        """Return where the marker of calls stands that was just read."""
        code = self._writer.code
        code.meet_marker()
        if code.is_quote:
            return Place.QUOTED
        return Place.ASIDE if is_thinking or code.is_open else Place.ANSWER

    def _read_again(self, text: str, write: Write, marker: str = "") -> None:
        """Put back text that was read and is no call, because markers may be in it.

        Args:
            text: the text.
            write: receives the text that is not put back.
            marker: the beginning of the text, which is not put back.
        """
        again = text[len(marker) :]
        if len(again) <= self._again_chars_left:
            self._again_chars_left -= len(again)
            self._source.unread(again)
            text = text[: len(marker)]
        if text:
            write(text)

    def _read_bare(self) -> Reading[None]:
        """Read calls without a marker, at the start of an answer."""
        if self._calls is None or not self._writer.is_fresh:
            return
        self._source.record()
        self._context.place = Place.ANSWER
        with contextlib.suppress(NotCallError):
            yield from self._calls.read_bare(self._context)
        self._read_again(self._source.recorded(), self._writer.text)
