"""Parser of tool calls in generated text. Owns one format; runs no tools.

The format is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in Qwen, Hermes and the
built-in model. A complete call is removed from the text; a call that is not valid JSON stays text.
"""

import dataclasses
import secrets

import msgspec

OPENING_TAG = "<tool_call>"
CLOSING_TAG = "</tool_call>"
CALL_CHARS_MAX = 1_000_000
"""Longest call; a longer one stays text."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete tool call that was found in generated text."""

    call_id: str
    """Random id, made by the parser; a tool message answers the call by it."""
    name: str
    arguments: str
    """A JSON object as a string."""
    number: int
    """Position among the calls of its completion, counted from 0."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, msgspec.Raw] | str = msgspec.field(default_factory=dict)


class ToolCallParser:
    """Parser that separates one completion's streamed text into text and tool calls."""

    def __init__(self) -> None:
        self._buffer = ""
        """Text that may be part of a call, or white space before one."""
        self._gap = ""
        """White space before the current call; it becomes text if the call is not valid."""
        self._is_inside = False
        self.count = 0
        """Calls found so far."""

    def push(self, text: str) -> list[str | ParsedCall]:
        """Add the next piece of text and return the parts that later text cannot change.

        Returns:
            Texts and complete tool calls in the order of the completion. Text that may belong to a
            call is held back.
        """
        self._buffer += text
        found: list[str | ParsedCall] = []
        while True:
            if not self._is_inside:
                start = self._buffer.find(OPENING_TAG)
                if start < 0:
                    self._emit_text(found, self._safe_chars())
                    return found
                self._emit_text(found, len(self._buffer[:start].rstrip()))
                rest = self._buffer.lstrip()
                self._gap = self._buffer[: len(self._buffer) - len(rest)]
                self._buffer = rest
                self._is_inside = True
            end = self._buffer.find(CLOSING_TAG)
            if end < 0:
                if len(self._buffer) > CALL_CHARS_MAX:
                    found += self.finish()
                return found
            stop = end + len(CLOSING_TAG)
            call = _parse_call(self._buffer[len(OPENING_TAG) : end], self.count)
            whole, self._buffer = self._buffer[:stop], self._buffer[stop:]
            self._is_inside = False
            self.count += call is not None
            found.append(self._gap + whole if call is None else call)
            self._gap = ""

    def finish(self) -> list[str | ParsedCall]:
        """Return the text held back at the completion's end, as a list with at most one text.

        It is [] if the text is only white space after calls.
        """
        rest = self._gap + self._buffer
        self._gap, self._buffer, self._is_inside = "", "", False
        # White space around calls is layout, so it is dropped; without calls it is text.
        return [rest] if rest and not (self.count and rest.isspace()) else []

    def _emit_text(self, found: list[str | ParsedCall], chars: int) -> None:
        if chars > 0:
            found.append(self._buffer[:chars])
            self._buffer = self._buffer[chars:]

    def _safe_chars(self) -> int:
        """Return how many first characters of the buffer cannot be part of a call or its layout."""
        size = len(self._buffer)
        for length in range(min(len(OPENING_TAG) - 1, size), 0, -1):
            if OPENING_TAG.startswith(self._buffer[size - length :]):
                size -= length
                break
        return len(self._buffer[:size].rstrip())


def _parse_call(body: str, number: int) -> ParsedCall | None:
    try:
        call = msgspec.json.decode(body.encode(), type=_Call)
        given = call.arguments
        if isinstance(given, str):
            # Some models write the arguments as a string with JSON in it.
            given = msgspec.json.decode(given.encode(), type=dict[str, msgspec.Raw])
        arguments = msgspec.json.encode(given).decode()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return ParsedCall(f"call_{secrets.token_hex(12)}", call.name, arguments, number)
