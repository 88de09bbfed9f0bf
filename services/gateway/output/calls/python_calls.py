"""Calls as a list of Python calls, `[name(key="text", other=1)]`: LFM2, Llama 4, Olmo 3."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from services.gateway.conversation.conversation import Call
from services.gateway.output import argument_types, json_text
from services.gateway.output.argument_types import ANY, Types
from services.gateway.output.calls.call_format import CallContext, CallFormat, written_json
from services.gateway.output.source import SPACE, Markers, Reading, Source

_NAME = re.compile(r"[\w.\-]*")
_BARE = re.compile(r"[^,(){}\[\]\"'\s]*")
"""A value that is no string, list or dict."""
_CLOSING = {"[": "]", "(": "]", "{": "}"}
_ENDS = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v",
    "\n": "", "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonCalls(CallFormat):
    """Calls in Python's syntax, after a marker or at the start of an answer."""

    opening: str = ""
    """Marker before the calls; "" if an answer that begins with a known tool is a call."""
    closing: str = ""
    has_lines: bool = False
    """Each call has a line of its own, without a list around them."""

    @property
    def openings(self) -> tuple[str, ...]:  # type: ignore[override]
        """The marker before the calls."""
        return (self.opening,) if self.opening else ()

    @property
    def special_texts(self) -> tuple[str, ...]:  # type: ignore[override]
        """The closing marker."""
        return (self.closing,) if self.closing else ()

    def read(self, _opening: str, context: CallContext) -> Reading[None]:
        """Read the calls after an opening marker."""
        source = context.source
        yield from self._read_calls(context, must_know=False)
        yield from source.run(SPACE)
        if self.closing and (yield from source.take(self.closing)):
            context.take_layout()

    def read_bare(self, context: CallContext) -> Reading[None]:
        """Read calls at the start of an answer, if the format has no marker."""
        if not self.opening:
            yield from context.source.run(SPACE)
            if (yield from context.source.peek()) == "[":
                yield from self._read_calls(context, must_know=True)

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls as the model writes them."""
        items = []
        for call in calls:
            pairs = [f"{name}={_literal(value)}" for name, value in call.arguments.items()]
            items.append(f"{call.name}({', '.join(pairs)})")
        if self.has_lines:
            return "\n".join([self.opening, *items, self.closing])
        return f"{self.opening}[{', '.join(items)}]{self.closing}"

    def _read_calls(self, context: CallContext, *, must_know: bool) -> Reading[None]:
        """Read calls, in a list or one on each line."""
        source = context.source
        yield from source.run(SPACE)
        is_list = yield from source.take("[")
        while (yield from self._read_call(context, must_know=must_know)):
            yield from source.run(SPACE)
            yield from source.take(",")
            yield from source.run(SPACE)
            if is_list and (yield from source.take("]")):
                context.take_layout()
                return

    def _read_call(self, context: CallContext, *, must_know: bool) -> Reading[bool]:
        """Read one call; return whether another may follow."""
        source, write = context.source, context.write
        yield from source.run(SPACE)
        name = yield from source.run(_NAME, json_text.NAME_CHARS_MAX)
        is_known = bool(name) and (context.knows(name) or not must_know)
        if not is_known or not (yield from source.take("(")):
            return False
        context.begin(name)
        write("{")
        is_whole = yield from self._copy_arguments(context)
        if not is_whole:
            yield from context.break_off(self._rest_end, "the arguments are no Python")
        context.end()
        return is_whole

    @functools.cached_property
    def _rest_end(self) -> Markers:
        """Marker after a call that does not follow the format."""
        return Markers(self.closing or ")]")

    def _copy_arguments(self, context: CallContext) -> Reading[bool]:
        """Copy the arguments after their opening bracket; return whether they were whole."""
        source, write = context.source, context.write
        names = context.argument_names()
        position = 0
        while True:
            yield from source.run(SPACE)
            if (yield from source.take(")")):
                write("}")
                return True
            write(", " if position else "")
            char = yield from source.peek()
            text = "" if char in ("[", "{", "(", '"', "'") else (yield from source.run(_NAME))
            space = yield from source.run(SPACE)
            if text and (yield from source.take("=")):
                write(f'"{json_text.escaped(text)}": ')
                is_value = yield from self._copy_value(context, context.types(text), 1)
            elif position < len(names):
                key = names[position]
                write(f'"{json_text.escaped(key)}": ')
                types = context.types(key)
                if text:
                    write(argument_types.literal_as_json(text, types))
                    is_value = True
                else:
                    is_value = yield from self._copy_value(context, types, 1)
            else:
                write(text + space)
                return False
            position += 1
            yield from source.run(SPACE)
            if not is_value or not (
                (yield from source.take(",")) or (yield from source.peek()) == ")"
            ):
                return False

    def _copy_value(self, context: CallContext, types: Types, depth: int) -> Reading[bool]:
        """Copy a literal as JSON; return whether it was whole."""
        source, write = context.source, context.write
        yield from source.run(SPACE)
        char = yield from source.peek()
        if char in ('"', "'"):
            return (yield from self._copy_string(context, char))
        if char and char in _CLOSING:
            return (yield from self._copy_items(context, char, depth))
        text = yield from source.run(_BARE, json_text.NUMBER_CHARS_MAX)
        if text and (yield from source.peek()):
            write(argument_types.literal_as_json(text, types))
            return True
        return False

    def _copy_items(self, context: CallContext, opening: str, depth: int) -> Reading[bool]:
        source, write = context.source, context.write
        if depth > json_text.DEPTH_MAX:
            return False
        yield from source.read(1)
        write("[" if opening == "(" else opening)
        is_first = True
        while True:
            yield from source.run(SPACE)
            if (yield from source.take(_ENDS[opening])):
                write(_CLOSING[opening])
                return True
            write("" if is_first else ", ")
            is_first = False
            if opening == "{":
                quote = yield from source.peek()
                if quote not in ('"', "'"):
                    return False
                yield from self._copy_string(context, quote)
                yield from source.run(SPACE)
                if not (yield from source.take(":")):
                    return False
                write(": ")
            if not (yield from self._copy_value(context, ANY, depth + 1)):
                return False
            yield from source.run(SPACE)
            if not (yield from source.take(",")) and ((yield from source.peek()) != _ENDS[opening]):
                return False

    def _copy_string(self, context: CallContext, quote: str) -> Reading[bool]:
        """Copy a string, which may have three quotes, as JSON."""
        source, write = context.source, context.write
        yield from source.read(1)
        is_long = False
        write('"')
        if (yield from source.take(quote)):
            is_long = yield from source.take(quote)
            if not is_long:
                write('"')
                return True

        def escape(text: str) -> None:
            write(json_text.escaped(text))

        while True:
            char = yield from source.copy_run(_PLAIN[quote], escape)
            if not char:
                return False
            if char == "\\":
                yield from source.read(1)
                escape((yield from _read_escape(source)))
            elif (yield from source.take(quote * 3 if is_long else quote)):
                write('"')
                return True
            else:
                escape((yield from source.read(1)))


def _read_escape(source: Source) -> Reading[str]:
    """Read an escape after its backslash and return its character."""
    kind = yield from source.read(1)
    digits = _CODE_DIGITS.get(kind, 0)
    if not digits:
        return _ESCAPES.get(kind, "\\" + kind)
    code = yield from source.read(digits)
    try:
        return chr(int(code, 16)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except (ValueError, OverflowError):
        return f"\\{kind}{code}"


def _literal(value: Any) -> str:
    """Return a JSON value in Python's syntax."""
    if isinstance(value, dict):
        pairs = [f"{written_json(name)}: {_literal(one)}" for name, one in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return written_json(value) if isinstance(value, str) else repr(value)
