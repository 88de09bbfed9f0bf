"""Encoding of frames as parts of a ZeroMQ message: header and body. Owns the header's layout."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shared import limits
from shared.errors import FrameRefused
from shared.transport import codec
from shared.transport.delivery import Frame

_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The version and the fields of a `Frame` but its body, in wire order."""

    version: int
    epoch: _Number
    sender: _Number
    receiver: _Number
    number: _Number
    acknowledged: _Number
    kind: str


_headers = msgspec.msgpack.Decoder(_Header)


def pack(frame: Frame) -> list[bytes]:
    """Return the parts of a ZeroMQ message: the packed header, and the body unless it is empty."""
    *fields, body = msgspec.structs.astuple(frame)
    header = codec.pack_header((limits.PROTOCOL_VERSION, *fields))
    return [header, body] if body else [header]


def unpack(parts: list[bytes]) -> Frame:
    """Return the frame in the parts of a ZeroMQ message: [header] or [header, body].

    Raises:
        FrameRefused: when there are other parts, its protocol version differs, or its header is
            invalid.
    """
    if not 1 <= len(parts) <= 2:
        raise FrameRefused(f"{len(parts)} parts instead of 1 or 2")
    try:
        header = _headers.decode(parts[0])
    except codec.DECODE_ERRORS as error:
        raise FrameRefused(_header_fault(parts[0], error)) from None
    if header.version != limits.PROTOCOL_VERSION:
        raise FrameRefused(_version_fault(header.version))
    _, *of_frame = msgspec.structs.astuple(header)
    return Frame(*of_frame, *parts[1:])


def _header_fault(packed: bytes, error: Exception) -> str:
    """Return why a packed header cannot be read; another version may have other fields."""
    fields: Any = codec.unpack(packed)
    if not isinstance(fields, list) or not fields or type(fields[0]) is not int:
        return "the header is not an array that begins with a version"
    if fields[0] != limits.PROTOCOL_VERSION:
        return _version_fault(fields[0])
    return f"the header has other fields than this version's: {error}"


def _version_fault(version: int) -> str:
    return f"protocol version {version}, not {limits.PROTOCOL_VERSION}"
