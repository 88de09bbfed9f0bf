"""Parsing of JSON request bodies into types, and JSON of their parts. Mistakes are a 400 by name.

Decoding holds the interpreter lock, which a worker thread does not change. So bodies are counted
in pieces before they are decoded, and what would take longer than about 50 ms is refused.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import orjson

from services.gateway.http.errors import ApiError, invalid, invalid_field

T = TypeVar("T")

SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are decoded at once, since handing one to a thread costs more. Measured:
at most 4 ms."""
PARTS_MAX = 100_000
"""Objects, arrays, fields and list elements of one body, without numbers in lists. 4,096 messages
of several parts have half as many. Measured: decoding this many takes up to 25 ms."""
NUMBERS_MAX = 1_000_000
"""Numbers in the lists of one body, which are token ids of prompts. Measured: decoding this many
takes 30 ms, converting them 15 ms."""
DEPTH_MAX = 64
"""Deepest nesting of a field of free structure, such as a tool's parameters."""

UNKNOWN_FIELD = "unknown_parameter"
"""Code of the error for a field that the type does not have."""

_PIECE_BYTES = 512 * 1024
"""Text counted between two moments at which other threads may run. Measured: at most 15 ms."""
_LONG_DIGITS = b"0" * 32
"""Digits that take as long to decode as 32 short numbers. Measured: numbers of 4,000 digits, whose
decoding takes the square of their length."""
_NO_MARKS = bytes(set(range(256)) - set(b'[]{},:"0123456789'))
_DIGITS_AS_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*?)`")
_NAME_CHARS_MAX = 100
_ERROR_CHARS_MAX = 1_000


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Parse a JSON body and return it as the decoder's type.

    Raises:
        ApiError: 400 when the body is not JSON or does not fit the type; it names the field with
            the error, if there is one.
    """
    if not body or body.isspace():
        raise invalid("The request body is empty: send a JSON object.")
    check_parts([body])
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


def check_parts(texts: Iterable[bytes]) -> None:
    """Refuse JSON texts of one request that have too many parts to be decoded without a delay.

    Counting before decoding avoids building a million objects only to refuse them.

    Args:
        texts: the texts, none of them decoded yet.

    Raises:
        ApiError: 400 when they have more than `PARTS_MAX` parts or `NUMBERS_MAX` numbers together.
    """
    parts = numbers = 0
    for text in texts:
        for more_parts, more_numbers in _count_parts(text):
            parts += more_parts
            numbers += more_numbers
            if parts > PARTS_MAX:
                raise invalid(
                    f"The request body has more than {PARTS_MAX} objects, arrays, fields and list "
                    "elements: shorten its lists, or send several requests."
                )
            if numbers > NUMBERS_MAX:
                raise invalid(
                    f"The request body has more than {NUMBERS_MAX} numbers in lists, or very "
                    "long numbers: send prompts of token ids in several requests."
                )


def convert(value: object, kind: type[T], param: str) -> T:
    """Convert a parsed JSON value to a type without changing it, for example to a list of texts.

    Args:
        value: the value, as JSON was parsed without a type.
        kind: the type that it must have.
        param: path of the request field with the value, for errors.

    Raises:
        ApiError: 400 when the value does not have the type.
    """
    try:
        return msgspec.convert(value, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), param) from None


def to_json(value: object) -> bytes:
    """Return JSON of a value that has parts of a body: its integers may have any size.

    Args:
        value: what becomes JSON.

    Raises:
        ApiError: 400 when it cannot, because it is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        # An integer of more than 64 bits, or more than 250 levels.
        pass
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except (RecursionError, ValueError):
        raise invalid("A part of the request body is nested too deeply.") from None


def check_depth(value: object, param: str) -> None:
    """Refuse a parsed JSON value whose lists and dicts are nested deeper than `DEPTH_MAX`.

    Args:
        value: the value.
        param: path of the request field with the value, for errors.

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
    raise too_deep(param)


def too_deep(param: str) -> ApiError:
    """Return the 400 for a field whose value is nested deeper than `DEPTH_MAX`."""
    return invalid(f"{param} is nested deeper than {DEPTH_MAX} levels.", param, "invalid_value")


def _count_parts(body: bytes) -> Iterator[tuple[int, int]]:
    """Count the parts of a JSON text piece by piece.

    Yields:
        For each piece of the text the number of objects, arrays, fields and list elements without
        numbers, where short objects and arrays may count twice, and the number of numbers in lists,
        where long numbers count several times.
    """
    is_in_string = False
    start = 0
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # The piece ends inside an escape.
            piece = body[start : start + _PIECE_BYTES + 1]
        start += len(piece)
        # Most marks are in strings, for example in program text.
        unescaped = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Two adjacent quotes are an empty string, or the end of one string and the start of the
        # next with nothing counted between them. Removing both changes nothing else.
        marks = unescaped.translate(_DIGITS_AS_ZERO, _NO_MARKS).replace(b'""', b"")
        quotes = marks.count(b'"')
        if quotes > 2 * PARTS_MAX + 2:
            # Between any two remaining strings a part begins.
            yield PARTS_MAX + 1, 0
            return
        marks = b"".join(marks.split(b'"')[is_in_string::2])
        is_in_string ^= bool(quotes % 2)
        numbers = marks.count(b"0,") - marks.count(b"0,:") + marks.count(b"0]")
        containers = marks.count(b"[") + marks.count(b"{")
        # A comma begins every part but the first of an array or object.
        parts = containers + max(marks.count(b":"), marks.count(b",") - numbers)
        yield parts, numbers + len(_LONG_DIGITS) * marks.count(_LONG_DIGITS)


def _field_error(error: str, value_param: str = "") -> ApiError:
    """Turn a msgspec error such as "Expected `int` >= 1 - at `$.n`" into a 400 with a `param`.

    Args:
        error: the error.
        value_param: path of the value that has it; "": the whole body.
    """
    if len(error) > 2 * _ERROR_CHARS_MAX:
        # It repeats a name or value of the client; the path stands at the end.
        error = error[:_ERROR_CHARS_MAX] + error[-_ERROR_CHARS_MAX:]
    text, found, at = error.partition(" - at ")
    param = _param(at) if found else ""
    if value_param:
        dot = "." if param and not param.startswith("[") else ""
        param = f"{value_param}{dot}{param}"
    if unknown := _UNKNOWN.search(text):
        name = unknown[1][:_NAME_CHARS_MAX]
        full = f"{param}.{name}" if param else name
        return invalid(f"The field {full} is not supported.", full, UNKNOWN_FIELD)
    if missing := _MISSING.search(text):
        full = f"{param}.{missing[1]}" if param else missing[1]
        return invalid(f"The field {full} is missing.", full, "missing_required_parameter")
    if param.endswith("].type") and ".content[" in param and text.startswith("Invalid "):
        return invalid_field(param, f"{_clipped(text)}: only text is supported.", "invalid_value")
    if not param:
        return invalid(f"The request body must be a JSON object: {_clipped(text)}.")
    return invalid_field(param, f"{_clipped(text)}.", "invalid_value")


def _param(at: str) -> str:
    """Return `messages[0].content` for "`$.messages[0].content`"."""
    found = at.rpartition(" in ")[2].strip("`")
    return found.removeprefix("$").removeprefix(".")[:_NAME_CHARS_MAX]


def _clipped(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + "..."


def decode_arguments(text: str, param: str) -> Any:
    """Return a tool call's arguments as an object, or unchanged when they are not a JSON object.

    Args:
        text: the arguments, mostly JSON. Some clients send no text for no arguments.
        param: path of the request field, for errors.

    Raises:
        ApiError: 400 when they are nested too deeply; it names the field `param`.
    """
    try:
        value = msgspec.json.decode((text.strip() or "{}").encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
    except RecursionError:
        raise too_deep(param) from None
    if not isinstance(value, dict):
        return text
    check_depth(value, param)
    return value
