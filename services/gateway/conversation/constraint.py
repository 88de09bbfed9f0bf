"""Constraint of an answer's text, as all dialects mean it. Owns no grammar."""

import dataclasses
from typing import Any, Literal

import msgspec

from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field, unsupported


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer's text must match."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    value: Any
    """A JSON schema, a regular expression, a list of texts, or a Lark grammar."""
    param: str
    """The request field that it came from, for errors."""


def any_json_object(param: str) -> Constraint:
    """Return the constraint of an answer that is any JSON object.

    Args:
        param: the request field that asks for it.
    """
    return Constraint("json_schema", {"type": "object"}, param)


def json_schema(value: Any, param: str) -> Constraint:
    """Return the constraint of a JSON schema.

    Args:
        value: the schema, an object or a string with one.
        param: the request field that it came from.

    Raises:
        ApiError: 400 when it is no JSON object, or is nested too deeply.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise invalid_field(param, "the text is not valid JSON.") from None
    if not isinstance(value, dict):
        raise invalid_field(param, "a JSON schema must be an object.")
    request_body.check_depth(value, param)
    return Constraint("json_schema", value, param)


def read_format(requested: dict[str, Any] | None, param: str) -> Constraint | None:
    """Return the constraint of a format object whose schema is its own field `schema`.

    The Responses and the Messages API have such objects.

    Args:
        requested: the object; None: any text.
        param: the request field that it came from.

    Raises:
        ApiError: 400 when its type is not known, or its schema is not valid.
    """
    kind = "text" if requested is None else requested.get("type")
    if requested is None or kind == "text":
        return None
    if kind == "json_object":
        return any_json_object(param)
    if kind == "json_schema":
        return json_schema(requested.get("schema"), f"{param}.schema")
    problem = "the types text, json_object and json_schema are supported."
    raise unsupported(f"{param}.type", problem)
