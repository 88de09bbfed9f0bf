"""Gemma's calls: `call:NAME{key:<|"|>text<|"|>,other:1}`, which become JSON while they arrive."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

from services.gateway.conversation.conversation import Call
from services.gateway.output import argument_types, json_text
from services.gateway.output.argument_types import ANY, Types
from services.gateway.output.calls.call_format import CallContext, CallFormat, written_json
from services.gateway.output.source import SPACE, Markers, Reading

_NAME = re.compile(r"[^\s<>\"'{}:,]*")
_KEY = re.compile(r"[^<>\"{}\[\]:,\r\n]*")
_BARE = re.compile(r"[^,{}\[\]<]*")
"""A value without quotes."""
_BARE_CHARS_MAX = 65_536


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaCalls(CallFormat):
    """Calls as `call:` with name and an object whose keys have no quotes."""

    opening: str
    closing: str
    quote: str
    """Text before and after a string."""

    @property
    def openings(self) -> tuple[str, ...]:  # type: ignore[override]
        """The marker before a call."""
        return (self.opening,)

    @property
    def special_texts(self) -> tuple[str, ...]:  # type: ignore[override]
        """Quotes and the closing marker."""
        return (self.closing, self.quote)

    def read(self, _opening: str, context: CallContext) -> Reading[None]:
        """Read the call after an opening marker, and further ones before the closing marker."""
        source = context.source
        while True:
            yield from source.run(SPACE)
            if not (yield from source.take("call:")):
                break
            name = yield from source.run(_NAME, json_text.NAME_CHARS_MAX)
            if not name or not (yield from source.take("{")):
                return
            context.begin(name)
            context.write("{")
            is_whole = yield from self._copy_rest(context, is_list=False, depth=1)
            if not is_whole:
                yield from context.break_off(self._end, "the arguments do not follow the format")
            context.end()
            if not is_whole:
                return
        if (yield from source.take(self.closing)):
            context.take_layout()

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls as the model writes them."""
        return "".join(
            f"{self.opening}call:{call.name}{self._literal(call.arguments)}{self.closing}"
            for call in calls
        )

    def _literal(self, value: Any) -> str:
        """Return a JSON value with this format's quotes."""
        if isinstance(value, dict):
            pairs = (f"{self._key(name)}:{self._literal(one)}" for name, one in value.items())
            return f"{{{','.join(pairs)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._literal, value))}]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else written_json(value)

    def _key(self, name: str) -> str:
        """Return an argument's name, in quotes if it would not be read back without them."""
        is_plain = _KEY.fullmatch(name) and name == name.strip()
        return name if is_plain else self.quote + name + self.quote

    @functools.cached_property
    def _end(self) -> Markers:
        return Markers(self.closing)

    @functools.cached_property
    def _quote(self) -> Markers:
        return Markers(self.quote)

    def _copy_rest(self, context: CallContext, *, is_list: bool, depth: int) -> Reading[bool]:
        """Copy an object or a list after its opening bracket; return whether it was whole."""
        source, write = context.source, context.write
        closing = "]" if is_list else "}"
        if depth > json_text.DEPTH_MAX:
            return False
        yield from source.run(SPACE)
        if (yield from source.take(closing)):
            write(closing)
            return True
        while True:
            types = ANY
            if not is_list:
                key = yield from self._read_key(context)
                if key is None:
                    return False
                types = context.types(key) if depth == 1 else ANY
                write(f'"{json_text.escaped(key)}": ')
            if not (yield from self._copy_value(context, types, depth)):
                return False
            yield from source.run(SPACE)
            if (yield from source.take(closing)):
                write(closing)
                return True
            if not (yield from source.take(",")):
                return False
            write(", ")

    def _read_key(self, context: CallContext) -> Reading[str | None]:
        source = context.source
        yield from source.run(SPACE)
        if (yield from source.take(self.quote)):
            pieces: list[str] = []
            yield from source.until(self._quote, pieces.append)
            key = "".join(pieces)
        else:
            key = (yield from source.run(_KEY, json_text.NAME_CHARS_MAX)).strip()
        yield from source.run(SPACE)
        if key and (yield from source.take(":")):
            return key
        if (yield from source.peek()):
            context.write(key)
        return None

    def _copy_value(self, context: CallContext, types: Types, depth: int) -> Reading[bool]:
        source, write = context.source, context.write
        yield from source.run(SPACE)
        char = yield from source.peek()
        if char in ("{", "["):
            write((yield from source.read(1)))
            return (yield from self._copy_rest(context, is_list=char == "[", depth=depth + 1))
        if (yield from source.take(self.quote)):
            write('"')
            marker = yield from source.until(
                self._quote, lambda text: write(json_text.escaped(text))
            )
            write('"' if marker else "")
            return bool(marker)
        if char == '"':
            return (yield from json_text.copy_value(source, write))
        text = yield from source.run(_BARE, _BARE_CHARS_MAX)
        if not (yield from source.peek()):
            return False
        write(argument_types.literal_as_json(text.strip(), types))
        return bool(text.strip())
