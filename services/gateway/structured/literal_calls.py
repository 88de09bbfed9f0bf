"""Grammars of calls whose arguments are literals of their own kind: Gemma's and Python's.

Owns how values of a JSON schema are written in them. As in calls with values in tags, a strict
text without enum, const and pattern is free: limits of its length are not enforced.
"""

import abc
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.conversation.conversation import Tool
from services.gateway.output.calls.gemma_calls import GemmaCalls
from services.gateway.structured.grammar_writer import GrammarWriter, quote, search_regex
from services.gateway.structured.schema_choices import Unwritable, resolve

_NAME = "/[A-Za-z0-9_.-]{1,64}/"
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_UNWRITABLE = frozenset({
    "allOf", "not", "if", "patternProperties", "dependentSchemas", "dependentRequired",
    "dependencies", "prefixItems", "propertyNames", "contains", "minProperties", "maxProperties",
    "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
"""Keywords of schemas that these grammars cannot enforce."""
_SCALARS = ("integer", "number")


class _Literals(abc.ABC):
    """Writer of values in one kind of literals."""

    words: Mapping[str, str] = {"true": "true", "false": "false", "null": "null"}
    comma = ","
    colon = ":"

    def __init__(self, writer: GrammarWriter, root: Mapping[str, Any]) -> None:
        """Begin without rules.

        Args:
            writer: gets the rules.
            root: the tool's schema, in which references are looked up.
        """
        self.writer = writer
        self._root = root
        self._references: dict[str, str] = {}
        self._any = ""

    @abc.abstractmethod
    def free_text(self) -> str:
        """Return the expression of any string."""

    @abc.abstractmethod
    def text(self, value: str) -> str:
        """Return the expression of one string."""

    @abc.abstractmethod
    def pattern(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of strings with a pattern."""

    @abc.abstractmethod
    def key(self, name: str) -> str:
        """Return the expression of a key of an object, with the colon."""

    @abc.abstractmethod
    def any_key(self) -> str:
        """Return the expression of any key of an object, with the colon."""

    def any_value(self) -> str:
        """Return the expression of any value."""
        if not self._any:
            words = " | ".join(quote(word) for word in self.words.values())
            number = self.writer.add_json({"type": "number"})
            scalars = f"{self.free_text()} | {words} | {number}"
            comma = quote(self.comma)
            self._any = self.writer.recursive(
                lambda me: (
                    f'{scalars} | "[" ({me} ({comma} {me})*)? "]" | '
                    f'"{{" ({self.any_key()} {me} ({comma} {self.any_key()} {me})*)? "}}"'
                )
            )
        return self._any

    def value(self, schema: Any) -> str:
        """Return the expression of values that match a schema.

        Raises:
            Unwritable: when it cannot be enforced.
        """
        if not isinstance(schema, dict) or not schema:
            return self.any_value()
        if found := _UNWRITABLE & schema.keys():
            raise Unwritable(", ".join(sorted(found)))
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return self._one_of([self._constant(one) for one in values])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._one_of([self.value(one) for one in schema[keyword]])
        types = schema.get("type") or _implied_type(schema)
        if isinstance(types, list):
            return self._one_of([self.value({**schema, "type": one}) for one in types])
        return self._typed(types, schema)

    def _typed(self, kind: Any, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return self.pattern(schema) if "pattern" in schema else self.free_text()
            case "boolean":
                return f"({quote(self.words['true'])} | {quote(self.words['false'])})"
            case "null":
                return quote(self.words["null"])
            case "array":
                item = self.writer.rule(self.value(schema.get("items")))
                low, high = schema.get("minItems") or 0, schema.get("maxItems")
                return f'"[" {self._list(item, low, high)} "]"'
            case "object":
                return f'"{{" {self._members(schema)} "}}"'
            case _ if kind in _SCALARS:
                return self.writer.add_json(schema)
            case _:
                return self.any_value()

    def _list(self, item: str, low: int, high: int | None) -> str:
        if high == 0:
            return ""
        items = item
        if high != 1:
            most = "" if high is None else str(high - 1)
            items += f" ({quote(self.comma)} {item}){{{max(0, low - 1)},{most}}}"
        return items if low else f"({items})?"

    def _members(self, schema: Mapping[str, Any]) -> str:
        """Return the expression of an object's members, in the order of `members`."""
        properties = schema.get("properties")
        others = schema.get("additionalProperties")
        if isinstance(properties, dict) and properties:
            pairs = [
                (f"{self.key(name)} {self.value(part)}", name in (schema.get("required") or []))
                for name, part in self.ordered(properties)
            ]
            return in_order(self.writer, pairs, self.comma)
        if others is False:
            return ""
        pair = self.writer.rule(f"{self.any_key()} {self.value(others)}")
        return f"({pair} ({quote(self.comma)} {pair})*)?"

    def ordered(self, properties: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return properties in the order in which models write them."""
        return list(properties.items())

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self.text(value)
        written = json.dumps(value)
        if isinstance(value, dict | list):
            raise Unwritable("enum")
        return quote(self.words.get(written, written))

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            target = resolve(reference, self._root)

            def make(name: str) -> str:
                self._references[reference] = name
                return self.value(target)

            self.writer.recursive(make)
        return self._references[reference]

    def _one_of(self, options: Sequence[str]) -> str:
        return self.writer.rule(" | ".join(options))


class _GemmaLiterals(_Literals):
    """Objects with bare keys, in alphabetical order, and strings between markers."""

    def __init__(self, writer: GrammarWriter, root: Mapping[str, Any], mark: str) -> None:
        """Begin without rules; `mark` stands before and after a string."""
        super().__init__(writer, root)
        self._mark = mark

    def free_text(self) -> str:
        return f"{self.writer.literal(self._mark)} {self.writer.up_to(self._mark)}"

    def text(self, value: str) -> str:
        mark = self.writer.literal(self._mark)
        return f"{mark} {quote(value)} {mark}"

    def pattern(self, schema: Mapping[str, Any]) -> str:
        plain = self.writer.text_without(re.escape(self._mark))
        text = f"({search_regex(schema['pattern'])} & {plain})"
        return f"{self.writer.literal(self._mark)} {self.writer.up_to(self._mark, text)}"

    def key(self, name: str) -> str:
        if _PLAIN_NAME.fullmatch(name):
            return quote(f"{name}:")
        return f'{self.text(name)} ":"'

    def any_key(self) -> str:
        return f'({_NAME} | {self.free_text()}) ":"'

    def ordered(self, properties: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return sorted(properties.items())


class _PythonLiterals(_Literals):
    """Python's literals, with strings in double quotes."""

    words: Mapping[str, str] = {"true": "True", "false": "False", "null": "None"}
    comma = ", "

    def free_text(self) -> str:
        # Escapes that JSON and Python read alike.
        return r'/"([^"\\\x00-\x1f]|\\["\\nrt])*"/'

    def text(self, value: str) -> str:
        return quote(json.dumps(value, ensure_ascii=False))

    def pattern(self, schema: Mapping[str, Any]) -> str:
        return self.writer.add_json({"type": "string", "pattern": schema["pattern"]})

    def key(self, name: str) -> str:
        return f"{self.text(name)} {quote(': ')}"

    def any_key(self) -> str:
        return f"{self.free_text()} {quote(': ')}"


def gemma_call(writer: GrammarWriter, form: GemmaCalls, tools: Sequence[Tool]) -> str:
    """Return the expression of one of Gemma's calls, without its markers.

    Args:
        writer: gets the rules.
        form: the model's format.
        tools: a tool, or several whose arguments may be any.

    Raises:
        Unwritable: when the schema of a strict tool cannot be enforced.
    """
    tool = tools[0]
    schema = tool.parameters or {}
    literals = _GemmaLiterals(writer, schema, form.quote)
    if tool.text_form is not None:
        mark = writer.literal(form.quote)
        [name] = schema["properties"]
        text = f"{mark} {writer.add_text_form(tool.text_form)} {mark}"
        arguments = f'"{{" {literals.key(name)} {text} "}}"'
    elif tool.is_strict:
        arguments = literals.value({**schema, "type": "object"})
    else:
        arguments = literals.value({"type": "object"})
    heads = " | ".join(quote(f"call:{one.name}") for one in tools)
    return writer.rule(f"({heads}) {arguments}")


def python_call(writer: GrammarWriter, tool: Tool) -> str:
    """Return the expression of one call in Python's syntax.

    Raises:
        Unwritable: when the schema of a strict tool cannot be enforced.
    """
    schema = tool.parameters or {}
    literals = _PythonLiterals(writer, schema)
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    if any(not _PLAIN_NAME.fullmatch(name) for name in properties):
        raise Unwritable("a property's name")
    if found := _UNWRITABLE & schema.keys() if tool.is_strict else ():
        raise Unwritable(", ".join(sorted(found)))
    if tool.is_strict and (properties or schema.get("additionalProperties") is False):
        required = schema.get("required") or []
        pairs = [
            (f"{quote(f'{name}=')} {literals.value(part)}", name in required)
            for name, part in properties.items()
        ]
        arguments = in_order(writer, pairs, literals.comma)
    else:
        keys = " | ".join(quote(f"{name}=") for name in properties) or f'{_NAME} "="'
        pair = writer.rule(f"({keys}) {literals.any_value()}")
        arguments = f"({pair} ({quote(literals.comma)} {pair})*)?"
    return writer.rule(f'{quote(f"{tool.name}(")} {arguments} ")"')


def in_order(writer: GrammarWriter, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Return the expression of items in their order, with separators between those that are there.

    Args:
        writer: gets the rules.
        items: the expression of each item, and whether it must be there.
        separator: text between two items.
    """
    between = quote(separator)
    rest = first = '""'
    # From the end, so that each rule has one item and names the rule of the later ones.
    for item, is_required in reversed(items):
        named = writer.rule(item)
        begun = f"{named} {rest}"
        first = begun if is_required else f"({begun} | {first})"
        first = writer.rule(first)
        rest = f"{between} {named}" + f" {rest}" if is_required else f"({between} {named})? {rest}"
        rest = writer.rule(rest)
    return first


def _implied_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else ""
