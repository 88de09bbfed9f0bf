"""Calls whose arguments stand between tags of their own, as text: they become JSON on the way.

Qwen3-Coder, Qwen3.5, Nemotron 3, Step, GLM, MiniMax, DeepSeek V3.2, Seed and LongCat write them.
Texts are not escaped, so one that has the closing tag in it is recognized by what follows.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

from services.gateway.conversation.conversation import Call
from services.gateway.output import json_text
from services.gateway.output.argument_types import STRING, ArgumentValue, Types
from services.gateway.output.calls.call_format import CallContext, CallFormat, written_json
from services.gateway.output.source import SPACE, Markers, Reading, Source

_NAME = re.compile(r"[^\s<>\"'{}|]*")
_KEY = re.compile(r"[^<>\"\r\n]*")
_JSON_CHARS_MAX = 16_384
"""Longest value that is read as JSON before its end is known. Other text is then read again, at
once and while others wait."""


class _TooLongError(Exception):
    """A value is longer than `_JSON_CHARS_MAX`."""


@dataclasses.dataclass(frozen=True)
class Tag:
    """Text around a name or a value."""

    opening: str
    """Text before it; "" for none."""
    closing: str
    """Text after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggedCalls(CallFormat):
    """Calls with one pair of tags for each argument."""

    section: Tag
    """Markers around all calls, or around each if `name` has no opening."""
    name: Tag
    """Texts around the name. An empty closing: the name ends at a character that no name has."""
    call_closing: str = ""
    """Text after a call's last argument; "": the section's closing marker."""
    key: Tag
    """Texts around an argument's name."""
    string_key_closing: str = ""
    """Text after an argument's name that says that its value is a string; "" for none."""
    value: Tag
    """Texts around its value."""
    has_lines: bool = False
    """A value stands on lines of its own; the line ends around it are layout."""
    begins_with_name: bool = False
    """The section's opening marker may be missing."""

    @property
    def openings(self) -> tuple[str, ...]:  # type: ignore[override]
        """Markers at which calls begin."""
        more = (self.name.opening,) if self.begins_with_name else ()
        return (self.section.opening, *more)

    @property
    def special_texts(self) -> tuple[str, ...]:  # type: ignore[override]
        """All further tags."""
        tags = (self.name, self.key, self.value)
        texts = [part for tag in tags for part in (tag.opening, tag.closing)]
        texts += [self.section.closing, self.call_closing, self.string_key_closing]
        return tuple(text for text in texts if text.strip())

    def read(self, opening: str, context: CallContext) -> Reading[None]:
        """Read the calls after an opening marker."""
        source = context.source
        if not self.name.opening or opening != self.section.opening:
            end = yield from self._read_call(context, must_know=opening != self.section.opening)
        else:
            end = self.name.closing
        while self.name.opening and end not in ("", self.section.closing):
            yield from source.run(SPACE)
            if (yield from source.take(self.section.closing)):
                end = self.section.closing
            elif (yield from source.take(self.name.opening)):
                end = yield from self._read_call(context)
            else:
                return
        if end == self.section.closing:
            context.take_layout()

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls as the model writes them."""
        has_one_section = self.name.opening and not self.begins_with_name
        line = "\n" if self.name.opening else ""
        opening, closing = f"{self.section.opening}{line}", f"\n{self.section.closing}"
        items = [self._written(call) for call in calls]
        if has_one_section:
            return opening + "\n".join(items) + closing
        return "\n".join(opening + item + closing for item in items)

    def _written(self, call: Call) -> str:
        """Return a call without the markers of its section."""
        line = "\n" if self.has_lines else ""
        lines = [self.name.opening + call.name + self.name.closing]
        for name, value in call.arguments.items():
            is_text = isinstance(value, str)
            closing = self.string_key_closing if is_text else ""
            lines.append(
                f"{self.key.opening}{name}{closing or self.key.closing}{self.value.opening}{line}"
                f"{value if is_text else written_json(value)}{line}{self.value.closing}"
            )
        return "\n".join([*lines, *([self.call_closing] if self.call_closing else [])])

    def _read_call(self, context: CallContext, *, must_know: bool = False) -> Reading[str]:
        """Read a call from its name on.

        Args:
            context: reads the text and receives the call.
            must_know: it is no call if it names no tool.

        Returns:
            The tag that ended it; "" if it is no call, or the text ended.
        """
        source = context.source
        yield from source.run(SPACE)
        name = yield from source.run(_NAME, json_text.NAME_CHARS_MAX)
        yield from source.run(SPACE)
        if not name or (must_know and not context.knows(name)):
            return ""
        if not (yield from self._ends_name(context)):
            return ""
        context.begin(name)
        yield from source.run(SPACE)
        if (yield from source.peek()) == "{":
            # Some models write the arguments as JSON between the tags of the call.
            end = yield from self._copy_object(context)
        else:
            context.write("{")
            end = yield from self._read_arguments(context)
            if not context.is_broken and (end or context.skipped.strip()):
                context.write("}")
        context.end()
        return end

    def _ends_name(self, context: CallContext) -> Reading[bool]:
        """Return whether a name has ended that is a call's, and not one that is only mentioned."""
        source = context.source
        if self.name.closing and not (yield from source.take(self.name.closing)):
            return False
        return (yield from source.is_next(self._after_name, or_end=False))

    def _copy_object(self, context: CallContext) -> Reading[str]:
        """Copy arguments that are JSON; return the tag that ended the call as `_read_call`."""
        source = context.source
        if (yield from json_text.copy_value(source, context.write)):
            return (yield from context.skip(self._call_ends))
        return (yield from context.break_off(self._call_ends, "the arguments are no JSON object"))

    def _read_arguments(self, context: CallContext) -> Reading[str]:
        """Read the arguments; return the tag that ended the call, "" if the text ended."""
        separator = ""
        while True:
            end = yield from context.skip(self._argument_ends)
            if end != self.key.opening:
                return end
            key = yield from self._read_key(context)
            if key is None:
                return (yield from context.break_off(self._call_ends, "an argument has no name"))
            name, types = key
            context.write(f'{separator}"{json_text.escaped(name)}": ')
            separator = ", "
            end = yield from self._read_value(context, types)
            if end != self.value.closing:
                return end

    def _read_key(self, context: CallContext) -> Reading[tuple[str, Types] | None]:
        """Read an argument's name and the opening of its value; None if they do not fit."""
        source = context.source
        key = (yield from source.run(_KEY, json_text.NAME_CHARS_MAX)).strip()
        types = context.types(key)
        is_whole = True
        if self.string_key_closing and (yield from source.take(self.string_key_closing)):
            types = STRING
        else:
            is_whole = yield from source.take(self.key.closing)
            types = types - STRING if self.string_key_closing else types
        if is_whole and self.value.opening:
            yield from source.run(SPACE)
            is_whole = yield from source.take(self.value.opening)
        if is_whole:
            return key, types
        if (yield from source.peek()):
            context.write(key)
        return None

    def _read_value(self, context: CallContext, types: Types) -> Reading[str]:
        """Read a value and the tag that ends it.

        Returns:
            The tag: that of the value, or that of the call if the value has none; "" if the text
            ended.
        """
        source = context.source
        value = ArgumentValue(types, context.write)
        if self.has_lines:
            yield from source.take("\n")
        if value.json_firsts and (tag := (yield from self._read_json(context, value))):
            return tag
        while True:
            marker = yield from source.until(self._value_ends, value.add)
            if not marker:
                # A value that is cut off stays incomplete: a client must not act on half a value.
                return ""
            tag = marker.removeprefix("\n")
            if (yield from source.is_next(self._followers(tag))):
                value.end()
                return tag
            value.add(marker)

    def _read_json(self, context: CallContext, value: ArgumentValue) -> Reading[str]:
        """Read a value that is JSON and the tag that ends it: strings in it may have such tags.

        Returns:
            The tag; "" if the value is no JSON, of which nothing was read then.
        """
        source = context.source
        source.hold()
        yield from source.run(SPACE)
        first = yield from source.peek()
        if first and first in value.json_firsts and (yield from self._skip_json(source)):
            yield from source.run(SPACE)
            tag = yield from self._take_end(context)
            is_end = tag and (yield from source.is_next(self._followers(tag)))
            # In a text that would become a string, quotes say nothing about where it ends.
            if is_end and value.end_with_json(source.held.removesuffix(tag)):
                source.release()
                return tag
        source.rewind()
        return ""

    def _skip_json(self, source: Source) -> Reading[bool]:
        """Read a JSON value; return whether it was whole, and not too long."""
        left = _JSON_CHARS_MAX

        def count(text: str) -> None:
            nonlocal left
            left -= len(text)
            if left < 0:
                raise _TooLongError

        try:
            return (yield from json_text.copy_value(source, count))
        except _TooLongError:
            return False

    def _take_end(self, context: CallContext) -> Reading[str]:
        """Read a tag that may end a value if one comes next; return it, else ""."""
        for tag in self._value_ends.texts:
            if (yield from context.source.take(tag)):
                return tag
        return ""

    def _followers(self, tag: str) -> Markers:
        """Return the markers of which one comes after a tag that ends a value."""
        return self._argument_ends if tag == self.value.closing else self._section_end

    @functools.cached_property
    def _value_ends(self) -> Markers:
        """Tags at which a value may end; some models leave out its own."""
        ends = [end for end in (self.value.closing, self.call_closing) if end]
        lines = [f"\n{end}" for end in ends] if self.has_lines else []
        return Markers(*lines, *ends)

    @functools.cached_property
    def _call_ends(self) -> Markers:
        return Markers(*filter(None, (self.call_closing, self.section.closing)))

    @functools.cached_property
    def _argument_ends(self) -> Markers:
        return Markers(self.key.opening, *self._call_ends.texts)

    @functools.cached_property
    def _section_end(self) -> Markers:
        return Markers(self.section.closing)

    @functools.cached_property
    def _after_name(self) -> Markers:
        return Markers(self.key.opening, "{", *self._call_ends.texts)
