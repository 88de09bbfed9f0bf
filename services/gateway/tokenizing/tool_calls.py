"""Tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

This is the format of Qwen, Hermes and the built-in model. A call is taken out of the text once it
is complete; what looks like one and is not valid JSON stays text.
"""

import dataclasses
import secrets

import msgspec

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
CALL_CHARS_MAX = 1_000_000
"""A call that is longer is text."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call of a tool."""

    call_id: str
    name: str
    arguments: str
    """A JSON object as text."""


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, msgspec.Raw] | str = msgspec.field(default_factory=dict)


class ToolCalls:
    """Splits one completion's text into text and calls, piece by piece."""

    def __init__(self) -> None:
        self._buffer = ""
        """Text that is, or may become, a call; or white space that may stand before one."""
        self._gap = ""
        """White space before the call that is being read; it counts if that is no call."""
        self._is_inside = False
        self.count = 0
        """Calls found so far."""

    def push(self, text: str) -> list[str | ParsedCall]:
        """Take the next text; return what is certain, in order."""
        self._buffer += text
        found: list[str | ParsedCall] = []
        while True:
            if not self._is_inside:
                start = self._buffer.find(OPENING)
                if start < 0:
                    self._send_text(found, self._safe_chars())
                    return found
                self._send_text(found, len(self._buffer[:start].rstrip()))
                rest = self._buffer.lstrip()
                self._gap = self._buffer[: len(self._buffer) - len(rest)]
                self._buffer = rest
                self._is_inside = True
            end = self._buffer.find(CLOSING)
            if end < 0:
                if len(self._buffer) > CALL_CHARS_MAX:
                    found += self.finish()
                return found
            body = self._buffer[len(OPENING) : end]
            whole, self._buffer = self._buffer[: end + len(CLOSING)], self._buffer[end:]
            self._buffer = self._buffer[len(CLOSING) :]
            self._is_inside = False
            call = _parsed(body)
            self.count += call is not None
            found.append(self._gap + whole if call is None else call)
            self._gap = ""

    def finish(self) -> list[str | ParsedCall]:
        """Return what was held back: the completion has ended."""
        rest = self._gap + self._buffer
        self._gap, self._buffer, self._is_inside = "", "", False
        # White space around calls is layout; without calls it is the model's text.
        return [rest] if rest and not (self.count and rest.isspace()) else []

    def _send_text(self, found: list[str | ParsedCall], chars: int) -> None:
        if chars > 0:
            found.append(self._buffer[:chars])
            self._buffer = self._buffer[chars:]

    def _safe_chars(self) -> int:
        """Return how much text cannot be part of a call, nor white space before one."""
        size = len(self._buffer)
        for length in range(min(len(OPENING) - 1, size), 0, -1):
            if OPENING.startswith(self._buffer[size - length :]):
                size -= length
                break
        return len(self._buffer[:size].rstrip())


def _parsed(body: str) -> ParsedCall | None:
    try:
        call = msgspec.json.decode(body.encode(), type=_Call)
        given = call.arguments
        if isinstance(given, str):
            # Some models write the arguments as text that holds JSON.
            given = msgspec.json.decode(given.encode(), type=dict[str, msgspec.Raw])
        arguments = msgspec.json.encode(given).decode()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return ParsedCall(f"call_{secrets.token_hex(12)}", call.name, arguments)
