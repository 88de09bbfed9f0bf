"""Alternatives of a JSON schema's values, one by one. Owns references and joined schemas."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_DEPTH_MAX = 16
_CHOICES_MAX = 1_024
_NOTES = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$defs", "definitions",
})  # fmt: skip
"""Keywords that demand nothing."""
_UNKNOWN = frozenset({"not", "if", "$dynamicRef"})
_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number",
    list: "array", dict: "object", type(None): "null",
}  # fmt: skip


class Unwritable(Exception):
    """Raised for a schema whose values a grammar cannot enforce, with the keyword."""


def type_name(value: Any) -> str:
    """Return the name of a value's type in schemas."""
    return _NAMES[type(value)]


def resolve(reference: str, root: Schema) -> Any:
    """Return the part of a schema that a reference names.

    Raises:
        Unwritable: when it names no part.
    """
    target: Any = root
    for part in reference.removeprefix("#/").split("/") if reference != "#" else ():
        target = target.get(part) if isinstance(target, dict) else None
    if not reference.startswith("#") or target is None:
        raise Unwritable(f"$ref {reference}")
    return target


def choices(schema: Any, root: Schema, depth: int = 0) -> list[Schema]:
    """Return schemas that together allow the same values, each of one type or of one value.

    Args:
        schema: the schema.
        root: the schema in which references are looked up.
        depth: references and joined schemas around it.

    Raises:
        Unwritable: when the schema joins others in a way that is not understood.
    """
    if not isinstance(schema, dict):
        return [{}]
    if depth > _DEPTH_MAX:
        raise Unwritable("$ref")
    if found := _UNKNOWN & schema.keys():
        raise Unwritable(", ".join(sorted(found)))
    for joins in ("$ref", "allOf", "anyOf", "oneOf"):
        if joins in schema:
            rest = {key: value for key, value in schema.items() if key != joins}
            options = _joined(rest, joins, schema[joins], root)
            return _checked([one for option in options for one in choices(option, root, depth + 1)])
    kinds = schema.get("type")
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return _checked([{"const": one} for one in values if _is_one_of(one, kinds)])
    if isinstance(kinds, list):
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _joined(rest: Schema, keyword: str, value: Any, root: Schema) -> list[Schema]:
    """Return the alternatives of a keyword's value, each joined with the schema around it."""
    if keyword == "$ref":
        return [_merge(rest, resolve(str(value), root))]
    if keyword == "allOf":
        for one in value:
            rest = _merge(rest, one)
        return [rest]
    return [_merge(rest, one) for one in value]


def _merge(first: Schema, second: Any) -> Schema:
    """Return the schema of values that match both.

    Raises:
        Unwritable: when both have a keyword that cannot be joined.
    """
    if not isinstance(second, dict):
        return first
    merged = dict(first)
    for key, value in second.items():
        if key == "type" and key in first:
            merged[key] = _common_type(first[key], value)
        elif key not in _NOTES and first.get(key, value) != value:
            raise Unwritable(key)
        else:
            merged.setdefault(key, value)
    return merged


def _common_type(first: Any, second: Any) -> Any:
    kinds = first if isinstance(first, list) else [first]
    others = second if isinstance(second, list) else [second]
    return [kind for kind in kinds if kind in others]


def _is_one_of(value: Any, kinds: Any) -> bool:
    names = kinds if isinstance(kinds, list) else [kinds]
    name = type_name(value)
    return kinds is None or name in names or (name == "integer" and "number" in names)


def _checked(found: list[Schema]) -> list[Schema]:
    if len(found) > _CHOICES_MAX:
        raise Unwritable(f"more than {_CHOICES_MAX} alternatives")
    return found
