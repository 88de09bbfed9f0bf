"""Conversion between messages and bytes: msgpack, validated on arrival. Refuses unknown content.

Messages are written and read by msgspec, which validates a body against the union of the receiver's
messages while it reads it. Values of no known type are read by `msgpack`, which refuses extension
types.
"""

import math
import re
from typing import Any, Generic, TypeVar, get_args

import msgpack
import msgspec
from msgspec import inspect

from shared import limits
from shared.errors import FrameRefused

M = TypeVar("M", bound=msgspec.Struct)
_MAYBE_NOT_FINITE = (
    (b"\xcb", re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")),
    (b"\xca", re.compile(rb"\xca[\x7f\xff][\x80-\xff]")),
)
"""First byte of msgpack's float 64 and 32, and the encodings of those that are not finite, whose
exponent bits are all ones. Other values may match too, so a match only triggers an exact check. A
pattern that begins with one byte is found several times faster than an alternative of both."""

_WITHOUT_FLOATS = (
    inspect.IntType,
    inspect.StrType,
    inspect.BytesType,
    inspect.BoolType,
    inspect.NoneType,
    inspect.LiteralType,
)


DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that `msgspec.msgpack.Decoder` raises for hostile bytes."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Pack a message as a msgpack map with the class name under "type". Defaults are included."""
    return _encoder.encode(message)


def pack_header(fields: tuple[int | str, ...]) -> bytes:
    """Pack the fields of a frame's header, in wire order, as a flat msgpack array."""
    return _encoder.encode(fields)


def unpack(data: bytes) -> Any:
    """Unpack one msgpack value, whose fields are not checked here.

    Raises:
        FrameRefused: when the data is not exactly one msgpack value, is nested too deeply, contains
            an extension type or is not UTF-8.
    """
    try:
        # By default only text and bytes are map keys, and text must be UTF-8.
        return msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameRefused(f"not a msgpack value: {type(error).__name__}: {error}"[:300]) from None


class Decoder(Generic[M]):
    """Decodes and validates the messages of one union, for example `Decoder(ToRank)`."""

    def __init__(self, union: Any) -> None:
        """Prepare the decoding of a union of message classes."""
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self._with_floats = {
            one for one in get_args(union) if _may_hold_float(inspect.type_info(one))
        }
        """Classes whose numbers must be checked. Scanning a document of 15 MB for them took
        80 ms."""

    def decode(self, body: bytes) -> M:
        """Return the message in `body`.

        Raises:
            FrameRefused: when a field is unknown, missing, of another type or out of range; names
                it.
        """
        try:
            message = self._decoder.decode(body)
        except DECODE_ERRORS as error:
            raise FrameRefused(f"not a message for this link: {error}"[:300]) from None
        if type(message) in self._with_floats and not _holds_only_finite(body):
            raise FrameRefused("a number is not finite")
        return message


def _holds_only_finite(body: bytes) -> bool:
    """Return whether no float in a valid body is infinite or no number.

    A walk over all values takes longer than everything else, so the bytes are searched first.
    """
    for first_byte, encoding in _MAYBE_NOT_FINITE:
        if first_byte in body and encoding.search(body):
            return _is_finite(unpack(body))
    return True


def _may_hold_float(kind: inspect.Type) -> bool:
    """Return whether a valid value of this type may contain a float, at any depth."""
    match kind:
        case inspect.FloatType():
            return True
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            return _may_hold_float(inner)
        case inspect.DictType(value_type=inner):
            return _may_hold_float(inner)
        case inspect.StructType(fields=fields):
            return any(_may_hold_float(field.type) for field in fields)
        case inspect.UnionType(types=types):
            return any(map(_may_hold_float, types))
        case _:
            return not isinstance(kind, _WITHOUT_FLOATS)


def _is_finite(value: Any, depth: int = limits.MESSAGE_DEPTH_MAX) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return depth > 0 and all(_is_finite(item, depth - 1) for item in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_finite(item, depth - 1) for item in value)
    return True
