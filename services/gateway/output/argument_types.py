"""Types of a tool's arguments by its JSON schema. Owns turning values written as text to JSON."""

import ast
import functools
import json
from collections.abc import Callable
from typing import Any

import orjson

from services.gateway.output import json_text
from services.gateway.output.source import Write

Types = frozenset[str]
"""JSON types that a value may have; empty: any."""
STRING: Types = frozenset({"string"})
ANY: Types = frozenset()

_OPTIONAL_STRING: Types = frozenset({"string", "null"})
_SCHEMA_DEPTH_MAX = 16
_SCHEMA_PARTS_MAX = 256
"""Parts of a schema that are read for one argument: less than 1 ms, for which others wait."""
_LITERAL_CHARS_MAX = 16_384
"""Longest value that is tried as a Python literal, which takes 20 ms, for which others wait."""
_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number",
    list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def argument_types(parameters: dict[str, Any] | None, name: str) -> Types:
    """Return the types that one argument of a tool may have.

    Args:
        parameters: JSON schema of the tool's arguments; None: unknown.
        name: name of the argument.
    """
    if not isinstance(parameters, dict):
        return ANY
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, dict) else None
    if schema is None:
        schema = parameters.get("additionalProperties")
    return _TypeReader(parameters).types(schema)


class _TypeReader:
    """Reads the types of one schema, in which any number of ways may lead to one part."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._parts_left = _SCHEMA_PARTS_MAX

    def types(self, schema: Any, depth: int = 0) -> Types:
        """Return the types that a value may have; any, where that takes too much reading."""
        self._parts_left -= 1
        if not isinstance(schema, dict) or depth > _SCHEMA_DEPTH_MAX:
            return ANY
        found: set[str] = set()
        kind = schema.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        found.update(one for one in kinds if isinstance(one, str))
        if not found and isinstance(schema.get("enum"), list):
            found.update(_NAMES.get(type(value), "") for value in schema["enum"])
        if not found and "const" in schema:
            found.add(_NAMES.get(type(schema["const"]), ""))
        target = _resolve(schema.get("$ref"), self._root)
        if target is not None:
            found |= self.types(target, depth + 1)
        for key in ("anyOf", "oneOf"):
            if not found:
                types = self._each(schema.get(key), depth)
                found.update(*types if all(types) else [])
        if not found:
            found.update(*self._each(schema.get("allOf"), depth))
        if schema.get("nullable") is True and found:
            found.add("null")
        return ANY if self._parts_left < 0 else frozenset(found)

    def _each(self, schemas: Any, depth: int) -> list[Types]:
        """Return the types of each schema of a list, as long as parts may be read."""
        types = []
        for schema in schemas if isinstance(schemas, list) else ():
            if self._parts_left < 0:
                break
            types.append(self.types(schema, depth + 1))
        return types


def _resolve(reference: Any, root: dict[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: Any = root
    for part in reference[2:].split("/"):
        target = target.get(part) if isinstance(target, dict) else None
    return target


def as_json(text: str, types: Types) -> str:
    """Return the JSON of a value that the model wrote as text, without quotes or escapes.

    A text that fits none of the types becomes a string, so that nothing is lost.

    Args:
        text: the value as the model wrote it.
        types: types that it may have. Without any, JSON stays JSON.
    """
    stripped = text.strip()
    if _is_text(types):
        return "null" if "null" in types and stripped == "null" else _string(text)
    value = _fitting(stripped, types)
    if value is not None:
        return value
    if "string" not in types and "number" not in types and "integer" in types:
        return _whole_number(stripped) or _string(text)
    return _string(text)


def literal_as_json(text: str, types: Types) -> str:
    """Return a value without quotes as JSON, in a format that puts strings in quotes.

    Args:
        text: the value.
        types: types that it may have, as for `as_json`.
    """
    value = json_text.word(text)
    return value if value in ("null", "true", "false") else as_json(text, types)


def _is_text(types: Types) -> bool:
    """Return whether a value is always a string or null."""
    return "string" in types and types <= _OPTIONAL_STRING


def _fitting(text: str, types: Types) -> str | None:
    """Return the JSON of a text that is JSON or nearly so, and fits; None for any other text."""
    value = json_text.word(text) or _parsed(text, types)
    return value if value is not None and _fits(value, types) else None


def _parsed(text: str, types: Types) -> str | None:
    """Return the JSON of an object or a list that is JSON or nearly so; None for any other text."""
    if not text or text[0] not in _json_firsts(types) + ("(" if types else ""):
        return None
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return _mended(text) if types else None
    return text


def _json_firsts(types: Types) -> str:
    """Return the first characters of JSON that is no word."""
    # Where a string is allowed, quotes are part of it: it is written without them otherwise.
    return "{[" if types else '{["'


def _mended(text: str) -> str | None:
    """Return the JSON of a value with raw line ends in its strings, or in Python's syntax."""
    readers: list[Callable[[str], Any]] = [functools.partial(json.loads, strict=False)]
    if len(text) <= _LITERAL_CHARS_MAX:
        readers.append(ast.literal_eval)
    for read in readers:
        try:
            return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _fits(value: str, types: Types) -> bool:
    if not types:
        return True
    match value[0]:
        case "{":
            return "object" in types
        case "[":
            return "array" in types
        case '"':
            return "string" in types
        case "t" | "f":
            return "boolean" in types
        case "n":
            return "null" in types
    is_integer = value.lstrip("-").isdigit()
    return "number" in types or ("integer" in types and is_integer)


def _whole_number(text: str) -> str | None:
    """Return an integer that is written with decimals, such as 3.0."""
    whole, _, decimals = text.partition(".")
    return json_text.word(whole) if decimals and not decimals.strip("0") else None


def _string(text: str) -> str:
    return orjson.dumps(text).decode()


class ArgumentValue:
    """Value of one argument, written as text without quotes, that becomes JSON while it arrives.

    A string is passed on piece by piece; a value of another type when it has ended.
    """

    def __init__(self, types: Types, write: Write) -> None:
        """Begin a value.

        Args:
            types: types that it may have.
            write: receives its JSON.
        """
        self._types = types
        self._write = write
        self._held: list[str] = []
        self._held_chars = 0
        self._is_string = types == STRING
        if self._is_string:
            write('"')

    @property
    def json_firsts(self) -> str:
        """First characters of a value that may be JSON; "" if it is always a string or null."""
        return "" if _is_text(self._types) else _json_firsts(self._types)

    def add(self, text: str) -> None:
        """Add a piece of the value."""
        if self._is_string:
            self._write(json_text.escaped(text))
            return
        self._held.append(text)
        self._held_chars += len(text)
        if self._types == _OPTIONAL_STRING and self._held_chars > len("null"):
            held = "".join(self._held)
            if held.strip() not in ("null", "") and not "null".startswith(held.strip()):
                self._is_string = True
                self._write('"' + json_text.escaped(held))

    def end_with_json(self, text: str) -> bool:
        """End the value, of which this is all, if it is JSON that fits; return whether it is.

        Args:
            text: the value, with white space around it.
        """
        value = _fitting(text.strip(), self._types)
        if value is not None:
            self._write(value)
        return value is not None

    def end(self) -> None:
        """End the value."""
        if self._is_string:
            self._write('"')
        else:
            self._write(as_json("".join(self._held), self._types))
