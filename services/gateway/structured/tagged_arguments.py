"""Grammars of arguments between tags: strings without quotes, values of other types as JSON.

Owns which texts of a schema the parser reads back as the values that they stand for. Limits of a
string's length, and its `format`, are not enforced.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.conversation.conversation import Tool
from services.gateway.output import argument_types
from services.gateway.output.argument_types import STRING, Types
from services.gateway.output.calls.tagged_calls import TaggedCalls
from services.gateway.structured.grammar_writer import GrammarWriter, quote, search_regex
from services.gateway.structured.schema_choices import Schema, Unwritable, choices, type_name

_ANY_KEY = r"/[^<>\"\r\n]{1,128}/"
_KEY = re.compile(r"[^<>\"\r\n]{1,256}")
_WHOLE_OBJECT = frozenset({
    "allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "dependentSchemas",
    "dependentRequired", "dependencies", "propertyNames", "minProperties", "maxProperties",
    "unevaluatedProperties",
})  # fmt: skip
"""Keywords that hold for all arguments together, which this grammar cannot enforce."""
_NUMERIC: Types = frozenset({"integer", "number"})
_NUMERIC_LIMITS = frozenset({
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})  # fmt: skip
_INTEGER = r"-?(0|[1-9][0-9]*)"
_NUMBER = rf"{_INTEGER}(\.[0-9]+)?([eE][-+]?[0-9]+)?"
_STRIPPED = r"[\s\x1c-\x1f]*"
"""Characters that the parser drops at both ends of a value to find its type."""
_TAG_SPACE = r"[ \t\r\n]*"
_JSON_ONLY: Types = frozenset({"array", "object"})
_OPTIONAL_STRING: Types = frozenset({"string", "null"})


def tagged_arguments(writer: GrammarWriter, form: TaggedCalls, tool: Tool) -> str:
    """Return the expression of a call's arguments; a strict tool's follow its schema, in its order.

    Args:
        writer: gets the rules.
        form: the model's format.
        tool: the tool that is called.

    Raises:
        Unwritable: when the schema of a strict tool cannot be enforced.
    """
    arguments = _Arguments(writer, form, tool.parameters or {})
    if tool.text_form is not None:
        [name] = arguments.properties
        return arguments.text(name, writer.add_text_form(tool.text_form))
    return arguments.strict() if tool.is_strict else arguments.free()


@dataclasses.dataclass(frozen=True, slots=True)
class _Texts:
    """How an argument's values may be written."""

    raw: Sequence[str]
    """Terminal expressions of the texts without quotes, up to the closing tag."""
    json: Sequence[Schema]
    """Schemas of the values that are written as JSON."""


class _Arguments:
    """Writer of the arguments of one tool's calls."""

    def __init__(self, writer: GrammarWriter, form: TaggedCalls, schema: Schema) -> None:
        self._writer = writer
        self._form = form
        self._schema = schema
        self._shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        found = schema.get("properties")
        self.properties: Schema = found if isinstance(found, dict) else {}
        self._line = quote("\n") if form.has_lines else ""
        ends = [re.escape(form.value.closing)]
        if form.call_closing:
            # The parser takes these two for the end of a value without its own tag.
            closings = (re.escape(form.call_closing), re.escape(form.section.closing))
            ends.append(_TAG_SPACE.join(closings))
        self._text = writer.text_without("|".join(ends))

    def strict(self) -> str:
        """Return the expression of arguments that match the schema."""
        if found := _WHOLE_OBJECT & self._schema.keys():
            raise Unwritable(", ".join(sorted(found)))
        others = self._schema.get("additionalProperties")
        required = self._schema.get("required") or []
        missing = {name: others for name in required if name not in self.properties}
        if missing and others is False:
            raise Unwritable("required")
        parts = {**self.properties, **missing}
        if not parts:
            return '""' if others is False else f"({self._any_pair(others)})*"
        pairs = []
        for name, part in parts.items():
            if not _KEY.fullmatch(name) or name != name.strip():
                raise Unwritable(f"the property {name}")
            key = self._writer.literal(self._form.key.opening + name)
            types = argument_types.argument_types(dict(self._schema), name)
            pair = self._pair(key, part, types)
            pairs.append(pair if name in required else f"{pair}?")
        return " ".join(pairs)

    def free(self) -> str:
        """Return the expression of any arguments."""
        return f"({self._any_pair(None)})*"

    def text(self, name: str, value: str) -> str:
        """Return the expression of one argument whose text is an expression."""
        closing = self._form.string_key_closing or self._form.key.closing
        head = self._writer.literal(self._form.key.opening + name + closing)
        end = f"{self._line} {self._writer.literal(self._form.value.closing)}"
        return f"{head} {self._value_opening()} {value} {end} {self._writer.space}"

    def _any_pair(self, part: Any) -> str:
        """Return the expression of an argument of any name whose value matches a schema."""
        key = f"{self._writer.literal(self._form.key.opening)} {_ANY_KEY}"
        if isinstance(part, dict) and part:
            schema = {**self._shared, "additionalProperties": part}
            return self._pair(key, part, argument_types.argument_types(schema, ""))
        any_text = self._writer.up_to(self._form.value.closing, self._text)
        closings = filter(None, (self._form.string_key_closing, self._form.key.closing))
        ends = " | ".join(self._writer.literal(one) for one in closings)
        value = f"{self._value_opening()} {any_text}"
        return self._writer.rule(f"{key} ({ends}) {value} {self._writer.space}")

    def _pair(self, key: str, part: Any, types: Types) -> str:
        """Return the expression of a key, a value and its closing tag.

        Args:
            key: expression of the name and the text before it.
            part: schema of the value.
            types: types that the parser takes the value to have.
        """
        writer, form = self._writer, self._form
        texts = self._texts(part, types)
        options = []
        if texts.raw:
            closing = form.string_key_closing or form.key.closing
            value = writer.up_to(form.value.closing, f"({' | '.join(texts.raw)})")
            options.append(f"{writer.literal(closing)} {self._value_opening()} {value}")
        if texts.json:
            several = {"anyOf": [dict(one) for one in texts.json]}
            schema = texts.json[0] if len(texts.json) == 1 else several
            value = writer.add_json({**self._shared, **schema})
            end = f"{self._line} {writer.literal(form.value.closing)}"
            head = f"{writer.literal(form.key.closing)} {self._value_opening()}"
            options.append(f"{head} {value} {end}")
        if not options:
            raise Unwritable("a value that has no text of its own")
        return writer.rule(f"{key} ({' | '.join(options)}) {writer.space}")

    def _value_opening(self) -> str:
        """Return the expression of the text between a key and its value."""
        if not self._form.value.opening:
            return self._line
        # GLM has white space between key and value.
        return f"{self._writer.space} {self._writer.literal(self._form.value.opening)} {self._line}"

    def _texts(self, part: Any, types: Types) -> _Texts:
        """Return how values of a schema are written so that the parser reads them back."""
        if "string" not in types:
            return _Texts([], [part if isinstance(part, dict) else {}])
        parts = choices(part, self._schema)
        is_tagged = bool(self._form.string_key_closing)
        read_types = STRING if is_tagged else types
        is_open = any(one.get("type") == "string" and "const" not in one for one in parts)
        raw: list[str] = []
        as_json: list[Schema] = []
        for one in parts:
            kind = type_name(one["const"]) if "const" in one else one.get("type")
            if kind == "string":
                raw += self._strings(one, read_types, parts)
            elif is_tagged or kind not in ("null", "boolean", *_NUMERIC):
                as_json.append(one)
            elif "const" in one or kind in ("null", "boolean"):
                values = [one["const"]] if "const" in one else _WORDS[kind]
                written = [json.dumps(value) for value in values]
                raw += [f"{quote(text)} {self._line}" for text in written]
            elif not is_open:
                as_json.append(one)
            elif not _NUMERIC_LIMITS & one.keys():
                number = _INTEGER if kind == "integer" else _NUMBER
                raw.append(f"/{number}/ {self._line}")
            # Beside texts of many kinds, a number with limits cannot be told from a text.
        return _Texts(raw, as_json)

    def _strings(self, one: Schema, types: Types, parts: Sequence[Schema]) -> list[str]:
        """Return the terminal expressions of strings that the parser reads back as strings."""
        if "const" in one:
            text = one["const"]
            is_read = argument_types.as_json(text, types) == json.dumps(text, ensure_ascii=False)
            is_read &= self._form.value.closing not in text
            written = quote(text) or '""'
            return [f"{written} {self._line}"] if is_read else []
        text = self._text
        for excluded in _misread(types, parts):
            text += f" & ~/{excluded}/"
        if "pattern" not in one:
            return [f"({text})"]
        return [f"({search_regex(one['pattern'])} & {text}) {self._line}"]


_WORDS: Mapping[Any, Sequence[Any]] = {"null": [None], "boolean": [True, False]}


def _misread(types: Types, parts: Sequence[Schema]) -> list[str]:
    """Return regular expressions of texts that the parser takes for values which do not match.

    Args:
        types: types that the parser takes a value to have.
        parts: the alternatives of the value's schema.
    """
    if types <= _OPTIONAL_STRING:
        return []
    found = []
    if types & _JSON_ONLY:
        found.append(rf"{_STRIPPED}[\[{{(](.|\n)*")
    free = {one.get("type") for one in parts if "const" not in one}
    numeric = [one for one in parts if one.get("type") in _NUMERIC and "const" not in one]
    has_limits = any(_NUMERIC_LIMITS & one.keys() for one in numeric)
    words = []
    if types & _NUMERIC and (has_limits or not numeric):
        words.append(_NUMBER)
    if "boolean" in types and "boolean" not in free:
        words.append("[tT]rue|[fF]alse")
    if "null" in types and "null" not in free:
        words.append("null|None")
    return [*found, *(f"{_STRIPPED}({word}){_STRIPPED}" for word in words)]
