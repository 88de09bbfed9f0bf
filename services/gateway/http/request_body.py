"""Parsing of JSON request bodies into types. Every mistake is a 400 that names the field."""

import re
from typing import TypeVar

import msgspec

from services.gateway.http.errors import ApiError, invalid, invalid_field

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

PARTS_MAX = 100_000
"""Objects, arrays and fields of one body. 4,096 messages of several parts have half as many.
Building a million takes a second, which would stop all streams."""
DEPTH_MAX = 64
"""Deepest nesting of a field of free structure, such as a tool's parameters."""

_PART_STARTS = (b"[", b"{", b":")
_NO_MARKS = bytes(set(range(256)) - set(b'[{:"'))
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*?)`")
_NAME_CHARS_MAX = 100


def decode(decoder: msgspec.json.Decoder[B], body: bytes) -> B:
    """Parse a JSON body and return it as the decoder's type.

    Raises:
        ApiError: 400 when the body is not JSON or does not fit the type; it names the field with
            the error, if there is one.
    """
    if not body.strip():
        raise invalid("The request body is empty: send a JSON object.")
    if _count_parts(body) > PARTS_MAX:
        raise invalid(f"The request body has more than {PARTS_MAX} objects, arrays and fields.")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except UnicodeDecodeError:
        raise invalid("The request body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        if _LONE_SURROGATE.search(body):
            raise invalid("The request body has an unpaired surrogate escape.") from None
        raise invalid(f"The request body is not valid JSON: {error}.") from None
    except RecursionError:
        raise invalid("The request body is nested too deeply.") from None


def convert(value: object, kind: type[T], field: str) -> T:
    """Convert a parsed JSON value to a type without changing it, for example to a list of texts.

    Args:
        value: the value, as JSON was parsed without a type.
        kind: the type that it must have.
        field: name of the request field with the value, for errors.

    Raises:
        ApiError: 400 when the value does not have the type.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), field) from None


def check_depth(value: object, field: str) -> None:
    """Refuse a parsed JSON value whose lists and dicts are nested deeper than `DEPTH_MAX`.

    Args:
        value: the value.
        field: name of the request field with the value, for errors.

    Raises:
        ApiError: 400 when it is nested deeper.
    """
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise invalid(f"{field} is nested deeper than {DEPTH_MAX} levels.", field, "invalid_value")


def _count_parts(body: bytes) -> int:
    """Return how many objects, arrays and fields a JSON text has; exact up to `PARTS_MAX`.

    Counting before parsing avoids building a million objects only to refuse them.
    """
    count = sum(map(body.count, _PART_STARTS))
    if count <= PARTS_MAX:
        return count
    # Most brackets are in strings, for example in program text.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two adjacent quotes are an empty string, or the end of one string and the start of the next
    # with nothing counted between them. Removing both changes nothing else.
    marks = unescaped.translate(None, _NO_MARKS).replace(b'""', b"")
    if marks.count(b'"') > 2 * PARTS_MAX + 2:
        # Between any two remaining strings a part begins.
        return PARTS_MAX + 1
    return len(b"".join(marks.split(b'"')[::2]))


def _field_error(error: str, field: str = "") -> ApiError:
    """Turn a msgspec error such as "Expected `int` >= 1 - at `$.n`" into a 400 with a `param`."""
    text, found, at = error.partition(" - at ")
    param = _field_path(at) if found else ""
    param = field + param if param.startswith("[") or not param else param
    if unknown := _UNKNOWN.search(text):
        name = unknown[1][:_NAME_CHARS_MAX]
        full = f"{param}.{name}" if param else name
        return invalid(f"The field {full} is not supported.", full, "unknown_parameter")
    if missing := _MISSING.search(text):
        full = f"{param}.{missing[1]}" if param else missing[1]
        return invalid(f"The field {full} is missing.", full, "missing_required_parameter")
    if param.endswith("].type") and ".content[" in param and text.startswith("Invalid "):
        return invalid_field(param, f"{_clipped(text)}: only text is supported.", "invalid_value")
    if not param:
        return invalid(f"The request body must be a JSON object: {_clipped(text)}.")
    return invalid_field(param, f"{_clipped(text)}.", "invalid_value")


def _field_path(at: str) -> str:
    """Return `messages[0].content` for "`$.messages[0].content`"."""
    path = at.rpartition(" in ")[2].strip("`")
    return path.removeprefix("$").removeprefix(".")[:_NAME_CHARS_MAX]


def _clipped(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + "..."
