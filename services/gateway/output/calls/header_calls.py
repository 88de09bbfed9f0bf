"""Calls with a name before their JSON arguments: Kimi K2, DeepSeek V3, newer Mistral models."""

import dataclasses
import functools
import re
import secrets
import string
from collections.abc import Sequence

from services.gateway.conversation.conversation import Call
from services.gateway.output import json_text
from services.gateway.output.calls import json_calls
from services.gateway.output.calls.call_format import CallContext, CallFormat, written_json
from services.gateway.output.source import SPACE, Markers, Reading

SHORT_ID_CHARS = 9
"""Length of the ids that Mistral's templates accept: letters and digits."""

_ID_LETTERS = string.ascii_letters + string.digits
_HEADER = re.compile(r"[^\s<>\"'{}\[\]\uff5c|]*")
"""Characters of names and ids."""
_FENCE = "```"
_V3_KIND = "function"
"""Word before the separator in DeepSeek V3, whose name comes after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeaderCalls(CallFormat):
    """Calls as name, separator and JSON, in a section or one by one."""

    section_opening: str = ""
    """Marker before the first call; "" if the format has none."""
    section_closing: str = ""
    call_opening: str
    separator: str
    """Marker between name and arguments."""
    call_closing: str = ""
    id_opening: str = ""
    """Marker between name and id; "" if the format has none."""
    has_id_as_name: bool = False
    """The text before the separator is an id such as `functions.NAME:0`."""
    has_short_ids: bool = False
    """The template refuses ids that are not `SHORT_ID_CHARS` letters and digits."""
    reads_lists: bool = False
    """After the marker there may be a JSON list of calls, as older models write it."""

    @property
    def openings(self) -> tuple[str, ...]:  # type: ignore[override]
        """Markers at which calls begin."""
        return tuple(filter(None, (self.section_opening, self.call_opening)))

    @property
    def special_texts(self) -> tuple[str, ...]:  # type: ignore[override]
        """All further markers."""
        texts = (self.separator, self.id_opening, self.call_closing, self.section_closing)
        return tuple(filter(None, texts))

    def new_id(self) -> str:
        """Return the id of a call that has none in the text."""
        if not self.has_short_ids:
            return super().new_id()
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(SHORT_ID_CHARS))

    def read(self, opening: str, context: CallContext) -> Reading[None]:
        """Read the calls after an opening marker."""
        source = context.source
        is_call = opening == self.call_opening
        while True:
            if is_call and not (yield from self._read_call(context)):
                return
            yield from source.run(SPACE)
            if self.section_closing and (yield from source.take(self.section_closing)):
                context.take_layout()
                return
            is_call = yield from source.take(self.call_opening)
            if not is_call:
                return

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls as the model writes them, for DeepSeek those of V3 and R1."""
        items = []
        for number, call in enumerate(calls):
            head, arguments = call.name + self.separator, written_json(call.arguments)
            if self.has_id_as_name:
                head = f"functions.{call.name}:{number}{self.separator}"
            elif not self.id_opening:
                head = f"{_V3_KIND}{self.separator}{call.name}\n"
                arguments = f"{_FENCE}json\n{arguments}\n{_FENCE}"
            items.append(self.call_opening + head + arguments + self.call_closing)
        return self.section_opening + "\n".join(items) + self.section_closing

    def _read_call(self, context: CallContext) -> Reading[bool]:
        """Read a call from its name on; return whether another may follow."""
        source = context.source
        yield from source.run(SPACE)
        if self.reads_lists and (yield from source.peek()) in ("[", "{"):
            yield from json_calls.JsonCalls(self.call_opening).read(self.call_opening, context)
            return False
        name = yield from source.run(_HEADER, json_text.NAME_CHARS_MAX)
        call_id = ""
        if self.id_opening and (yield from source.take(self.id_opening)):
            call_id = yield from source.run(_HEADER, json_text.NAME_CHARS_MAX)
        yield from source.run(SPACE)
        is_separated = yield from source.take(self.separator)
        if not is_separated and not (self.reads_lists and (yield from source.peek()) == "{"):
            return False
        yield from source.run(SPACE)
        if name == _V3_KIND and (yield from source.peek()) != "{":
            name = yield from source.run(_HEADER, json_text.NAME_CHARS_MAX)
        if self.has_id_as_name:
            name, call_id = _split_id(name)
        if not name:
            return False
        context.begin(name, call_id)
        yield from self._read_arguments(context)
        context.end()
        return True

    def _read_arguments(self, context: CallContext) -> Reading[None]:
        source, write = context.source, context.write
        yield from source.run(SPACE)
        is_fenced = yield from source.take(_FENCE)
        if is_fenced:
            yield from source.take("json")
            yield from source.run(SPACE)
        if self.call_closing and (yield from source.take(self.call_closing)):
            write("{}")
            return
        is_whole = yield from json_text.copy_value(source, write)
        if is_whole:
            yield from source.run(SPACE)
            if is_fenced:
                yield from source.take(_FENCE)
                yield from source.run(SPACE)
            if not self.call_closing or (yield from source.take(self.call_closing)):
                return
        if is_whole:
            yield from context.skip(self._ends)
            return
        marker = yield from context.break_off(self._ends, "the arguments are no JSON object")
        if marker and not self.call_closing:
            source.unread(marker)

    @functools.cached_property
    def _ends(self) -> Markers:
        return Markers(self.call_closing or self.call_opening)


def _split_id(text: str) -> tuple[str, str]:
    """Return name and id of a call that is named by an id such as `functions.read:0`."""
    name, colon, index = text.rpartition(":")
    has_index = bool(colon) and index.isdigit()
    name = name if has_index else text
    return name.removeprefix("functions."), text if has_index else ""
