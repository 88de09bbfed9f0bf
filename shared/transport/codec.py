"""Bytes <-> messages. Packed by msgpack, validated on arrival; what is unknown is refused.

`msgpack` alone would accept extension types, NaN and any shape, so every body goes through
`msgspec.convert` with the union of what this receiver may be told.
"""

import math
import re
from typing import Any, Generic, TypeVar, get_args

import msgpack
import msgspec

from shared import limits
from shared.errors import FrameRefused

M = TypeVar("M", bound=msgspec.Struct)
_MAYBE_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]|\xca[\x7f\xff][\x80-\xff]", re.DOTALL)
"""How msgpack writes every number that is not finite, as float 64 or 32: the exponent is all ones.
Other values may look like it, so a match is only a reason to look closely."""


def encode(message: msgspec.Struct) -> bytes:
    """Pack a message: a msgpack map with the class name under "type" and defaults left in."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    return packed


def pack_header(fields: tuple[int | str, ...]) -> bytes:
    """Pack a link's header: a flat array of numbers and one word."""
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack(data: bytes) -> Any:
    """Unpack one msgpack value; anything hostile is a FrameRefused.

    Raises:
        FrameRefused: not one complete msgpack value, too deep, an extension type, or not UTF-8.
    """
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameRefused(f"not a msgpack value: {type(error).__name__}: {error}"[:300]) from None


class Decoder(Generic[M]):
    """Turns bodies into the messages of one union, for example `Decoder(ToRank)`."""

    def __init__(self, union: Any) -> None:
        self._union = union
        # `msgspec.convert` reads a union's types anew at each call, 4 to 9 microseconds; what it
        # needs of one class it keeps.
        self._classes: dict[object, Any] = {
            one.__struct_config__.tag: one for one in get_args(union)
        }

    def decode(self, body: bytes) -> M:
        """Return the message in `body`.

        Raises:
            FrameRefused: names the field that is unknown, missing, of another type or out of range.
        """
        value = unpack(body)
        name = value.get("type") if isinstance(value, dict) else None
        # Without such a class the union says what is wrong.
        expected = self._classes.get(name, self._union) if isinstance(name, str) else self._union
        try:
            message: M = msgspec.convert(value, expected, strict=True)
        except (msgspec.ValidationError, RecursionError) as error:
            raise FrameRefused(f"not a message for this link: {error}"[:300]) from None
        # One scan of the bytes instead of a walk over every value: 2 microseconds for 16 tokens.
        if _MAYBE_NOT_FINITE.search(body) and not _is_finite(value):
            raise FrameRefused("a number is not finite")
        return message


def _is_finite(value: Any, depth: int = limits.MESSAGE_DEPTH_MAX) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return depth > 0 and all(_is_finite(item, depth - 1) for item in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_finite(item, depth - 1) for item in value)
    return True
