"""Calls whose name is in JSON: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Qwen 2.5 and 3, Hermes, Granite, Llama 3, older Mistral models and the built-in model write them.
Read are all of these names and forms, in any format; the fields of `JsonCalls` say which of them a
model writes.
"""

import dataclasses
import re
from collections.abc import Sequence

from services.gateway.conversation.conversation import Call
from services.gateway.output import json_text
from services.gateway.output.calls.call_format import CallContext, CallFormat, written_json
from services.gateway.output.source import SPACE, Markers, Reading, Write, drop

HELD_CHARS_MAX = 65_536
"""Longest arguments that may stand before the name."""

_STRAY = re.compile(r"[ \t\r\n}\]]*")
"""White space and brackets that models write too many of before the closing marker."""
_NAME_KEYS = ("name", "function", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type")


@dataclasses.dataclass(frozen=True)
class JsonCalls(CallFormat):
    """Calls as JSON objects, one or a list of them, after a marker or at the start of an answer."""

    opening: str
    closing: str = ""
    """Marker after the calls; "" if the format has none."""
    writes_closing: bool = True
    """The model writes the closing marker; else it is only read."""
    others: tuple[str, ...] = ()
    """Further markers at which calls may begin."""
    reads_bare: bool = False
    """An answer that begins with an object is a call, if it names a tool."""
    has_list: bool = False
    """The calls stand in a list, even a single one."""
    name_key: str = "name"
    """Key of the tool's name."""
    arguments_key: str = "arguments"
    """Key of the arguments."""
    number_key: str = ""
    """Key of a call's number, which comes first; "" if calls have none."""

    @property
    def openings(self) -> tuple[str, ...]:  # type: ignore[override]
        """Markers at which calls begin."""
        return (self.opening, *self.others)

    @property
    def special_texts(self) -> tuple[str, ...]:  # type: ignore[override]
        """The closing marker."""
        return (self.closing,) if self.closing else ()

    @property
    def text_closing(self) -> str:  # type: ignore[override]
        """The marker: only a call at the start of an answer needs none."""
        return self.opening if self.reads_bare else ""

    def read(self, _opening: str, context: CallContext) -> Reading[None]:
        """Read the calls after an opening marker."""
        yield from self._read_calls(context, must_know=False)
        yield from context.source.run(_STRAY)
        if self.closing and (yield from context.source.take(self.closing)):
            context.take_layout()

    def read_bare(self, context: CallContext) -> Reading[None]:
        """Read calls at the start of an answer, if the format has such and a tool is named."""
        if self.reads_bare:
            yield from context.source.run(SPACE)
            if (yield from context.source.peek()) == "{":
                yield from self._read_calls(context, must_know=True)

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls as the model writes them."""
        items = []
        for number, call in enumerate(calls):
            fields = {self.number_key: str(number)} if self.number_key else {}
            items.append(
                written_json(
                    {**fields, self.name_key: call.name, self.arguments_key: call.arguments}
                )
            )
        if self.has_list:
            closing = self.closing if self.writes_closing else ""
            return f"{self.opening}[{', '.join(items)}]{closing}"
        if self.reads_bare:
            return "; ".join(items)
        return "\n".join(f"{self.opening}\n{item}\n{self.closing}".strip() for item in items)

    def _read_calls(self, context: CallContext, *, must_know: bool) -> Reading[None]:
        source = context.source
        yield from source.run(SPACE)
        is_list = yield from source.take("[")
        while (yield from self._read_call(context, must_know=must_know)):
            yield from source.run(SPACE)
            char = yield from source.peek()
            if char not in (",", ";", "{") or (char == "," and not is_list):
                break
            if char != "{":
                yield from source.read(1)
        if is_list:
            yield from source.run(SPACE)
            if (yield from source.take("]")):
                context.take_layout()

    def _read_call(self, context: CallContext, *, must_know: bool) -> Reading[bool]:
        """Read one object; return whether it was a whole call."""
        source = context.source
        yield from source.run(SPACE)
        if not (yield from source.take("{")):
            return False
        fields = _Fields(context, must_know=must_know)
        while True:
            yield from source.run(SPACE)
            key = yield from json_text.read_string(source)
            yield from source.run(SPACE)
            if key is None or not (yield from source.take(":")):
                return (yield from self._break(fields, context))
            if not (yield from fields.read(key)):
                return (yield from self._break(fields, context))
            yield from source.run(SPACE)
            if (yield from source.take(",")):
                continue
            if (yield from source.take("}")):
                return fields.end()
            return (yield from self._break(fields, context))

    def _break(self, fields: "_Fields", context: CallContext) -> Reading[bool]:
        """End a call that is no JSON: after its name, the rest is taken for arguments."""
        if not fields.is_begun:
            return False
        ends = Markers(self.closing or self.opening)
        if not fields.has_arguments:
            marker = yield from context.break_off(ends, "the call is no JSON object")
            if marker and not self.closing:
                context.source.unread(marker)
        elif self.closing:
            yield from context.skip(ends)
        context.end()
        return False


class _Fields:
    """Fields of one call's object, in any order."""

    def __init__(self, context: CallContext, *, must_know: bool) -> None:
        self._context = context
        self._must_know = must_know
        self._call_id = ""
        self._held: list[str] = []
        """Arguments that stand before the name."""
        self.is_begun = False
        self.has_arguments = False

    def read(self, key: str) -> Reading[bool]:
        """Read the value of a field; return whether it fits."""
        source = self._context.source
        yield from source.run(SPACE)
        if key in _ARGUMENT_KEYS and not self.has_arguments:
            return (yield from self._read_arguments())
        if key in (*_NAME_KEYS, "id") and not self.is_begun:
            text = yield from json_text.read_string(source)
            if text is None:
                return False
            if key == "id":
                self._call_id = text
            elif key in _NAME_KEYS:
                return self._begin(text)
            return True
        if self._must_know and key not in _KEYS:
            return False
        return (yield from json_text.copy_value(source, drop))

    def end(self) -> bool:
        """End the object; return whether it was a call."""
        if not self.is_begun:
            return False
        if not self.has_arguments:
            self._context.write("{}")
        self._context.end()
        return True

    def _begin(self, name: str) -> bool:
        if not name or any(char.isspace() for char in name):
            return False
        if self._must_know and not self._context.knows(name):
            return False
        self.is_begun = True
        self._context.begin(name, self._call_id)
        for piece in self._held:
            self._context.write(piece)
        return True

    def _read_arguments(self) -> Reading[bool]:
        source = self._context.source
        write: Write = self._context.write if self.is_begun else self._held.append
        first = yield from source.peek()
        if first == '"':
            # Some models write the arguments as a string with JSON in it.
            yield from source.read(1)
            if (yield from source.peek()) == '"':
                write("{}")
            is_whole = yield from json_text.copy_content(
                source, lambda piece: write(json_text.unescaped(piece))
            )
        elif first == "n" and (yield from source.take("null")):
            write("{}")
            is_whole = True
        else:
            is_whole = yield from json_text.copy_value(source, write)
        self.has_arguments = is_whole
        return is_whole and sum(map(len, self._held)) <= HELD_CHARS_MAX
