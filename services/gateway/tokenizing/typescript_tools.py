"""Tools declared as TypeScript, which the chat templates of Kimi K2.5 and later expect.

Their tokenizer class makes this text before it renders the template, and the model was trained on
it. Owns the form of declarations; a schema that has no such form is left to the template.
"""

import json
from typing import Any

ARGUMENT = "tools_ts_str"
"""Name of the text in the template."""

_INDENT = "  "
_NAMES = {
    "integer": "number",
    "object": "{}",
    "array": "Array<any>",
}
"""TypeScript's names of types in a list of types, where they differ."""
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""Keywords of a schema that are written as a comment, in alphabetical order."""

Schema = Any
"""A JSON schema: an object or a truth value."""


def declare_tools(tools: list[dict[str, Any]]) -> str | None:
    """Return the declarations of tools as one text; None if one of them has no such form.

    Args:
        tools: the tools as chat templates expect them.
    """
    try:
        functions = [_declare(tool["function"]) for tool in tools]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    joined = "\n".join(functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{joined}\n}}\n"


def _declare(function: dict[str, Any]) -> str:
    schema = function.get("parameters") or {}
    definitions = _definitions(schema)
    lines = []
    argument = _object(schema, "")
    if _refers_to_itself(schema):
        fields = ",\n".join(_fields(schema, _INDENT, has_required_first=False))
        lines.append(f"interface parameters {{\n{fields}\n}}")
        argument = "parameters"
    for name, definition in definitions.items():
        comment = _comment(definition.get("description", ""), "")
        lines.append(f"{comment}interface {name} {_type(definition, '')}")
    if function.get("description"):
        lines.append(_comment(function["description"], "").rstrip("\n"))
    lines.append(f"type {function.get('name', 'function')} = (_: {argument}) => any;")
    return "\n".join(lines)


def _type(schema: Schema, indent: str) -> str:
    """Return the TypeScript type of a schema whose first line is indented already."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return _referred(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(option, indent) for option in schema["anyOf"])
    if "enum" in schema:
        values = schema["enum"]
        return " | ".join(
            f'"{value}"' if isinstance(value, str) else str(value) for value in values
        )
    kind = schema["type"] if schema else "any"
    if isinstance(kind, list):
        return " | ".join(_NAMES.get(str(one), str(one)) for one in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return _array(schema, indent)
    return "number" if kind == "integer" else str(kind)


def _object(schema: dict[str, Any], indent: str) -> str:
    fields = _fields(schema, indent + _INDENT)
    others = schema.get("additionalProperties")
    if others is not None:
        name = "never" if others is False else _type(others, indent + _INDENT)
        fields.append(f"{indent}{_INDENT}[k: string]: {name}")
    if not fields:
        return "{}"
    joined = ",\n".join(fields)
    return f"{{\n{joined}\n{indent}}}"


def _array(schema: dict[str, Any], indent: str) -> str:
    items = schema.get("items") or {}
    comment = _comments(items, indent + _INDENT)
    if not comment:
        return f"Array<{_type(items, indent)}>"
    inner = indent + _INDENT
    return f"Array<\n{comment}{inner}{_type(items, inner)}\n{indent}>"


def _fields(schema: dict[str, Any], indent: str, *, has_required_first: bool = True) -> list[str]:
    """Return the properties of an object in alphabetical order."""
    required = schema.get("required", [])
    names = sorted(schema.get("properties", {}))
    if has_required_first:
        names.sort(key=lambda name: name not in required)
    return [
        _field(name, schema["properties"][name], indent, is_required=name in required)
        for name in names
    ]


def _field(name: str, schema: Schema, indent: str, *, is_required: bool) -> str:
    comment = _comments(schema, indent)
    default = schema.get("default") if isinstance(schema, dict) else None
    if default is not None:
        is_number = isinstance(default, (int, float))
        shown = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
        comment += f"{indent}// Default: {shown}\n"
    return f"{comment}{indent}{name}{'' if is_required else '?'}: {_type(schema, indent)}"


def _comments(schema: Schema, indent: str) -> str:
    """Return the description and the limits of a schema as lines of comments."""
    if not isinstance(schema, dict):
        return ""
    comment = _comment(schema.get("description", ""), indent)
    kind = schema.get("type")
    is_plain = not {"$ref", "anyOf", "enum"} & schema.keys()
    if is_plain and isinstance(kind, str):
        shown = [f"{key}: {schema[key]}" for key in _LIMITS.get(kind, ()) if key in schema]
        if shown:
            comment += f"{indent}// {', '.join(shown)}\n"
    return comment


def _comment(text: str, indent: str) -> str:
    lines = [f"{indent}// {line}\n" if line else "\n" for line in text.split("\n")]
    return "".join(lines) if text else ""


def _referred(reference: str) -> str:
    if reference == "#":
        return "parameters"
    if not reference.startswith("#/$defs/"):
        raise ValueError(reference)
    return reference.rsplit("/", 1)[-1]


def _definitions(schema: Schema) -> dict[str, Any]:
    """Return the definitions of a schema and of the objects in it, by name."""
    found: dict[str, Any] = {}
    if isinstance(schema, dict):
        found |= sorted(schema.get("$defs", {}).items())
        for value in schema.get("properties", {}).values():
            found |= _definitions(value)
    return found


def _refers_to_itself(schema: Any) -> bool:
    """Return whether a part of a schema, apart from its definitions, refers to the whole."""
    if isinstance(schema, dict):
        parts = (value for key, value in schema.items() if key != "$defs")
        return schema.get("$ref") == "#" or any(map(_refers_to_itself, parts))
    return isinstance(schema, list) and any(map(_refers_to_itself, schema))
