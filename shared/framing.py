"""A link's frames as parts of a ZeroMQ message: a header, and the body of a message."""

from typing import Any

from shared import codec, limits
from shared.delivery import Frame
from shared.errors import FrameRefused
from shared.identifiers import Incarnation

_FIELD_TYPES = [int, int, int, int, int, str]
_NUMBER_MAX = 2**63 - 1


def pack(frame: Frame) -> list[bytes]:
    """Return the parts to send; docs/protocol.md says what the header's fields mean."""
    header = codec.pack_header(
        (
            limits.PROTOCOL_VERSION,
            frame.epoch,
            frame.sender,
            frame.receiver,
            frame.number,
            frame.acknowledged,
            frame.kind,
        )
    )
    return [header, frame.body] if frame.body else [header]


def unpack(parts: list[bytes]) -> Frame:
    """Return the frame in `parts`.

    Raises:
        FrameRefused: it is of another protocol version, or of another shape than this version's.
    """
    if not 1 <= len(parts) <= 2:
        raise FrameRefused(f"{len(parts)} parts instead of 1 or 2")
    fields: Any = codec.unpack(parts[0])
    if not isinstance(fields, list) or not fields or type(fields[0]) is not int:
        raise FrameRefused("the header is not an array that begins with a version")
    if fields[0] != limits.PROTOCOL_VERSION:
        raise FrameRefused(f"protocol version {fields[0]}, not {limits.PROTOCOL_VERSION}")
    if [type(field) for field in fields[1:]] != _FIELD_TYPES:
        raise FrameRefused("the header has other fields than this version's")
    if not all(0 <= number <= _NUMBER_MAX for number in fields[1:6]):
        raise FrameRefused("a number in the header is out of range")
    epoch, sender, receiver, number, acknowledged, kind = fields[1:]
    body = parts[1] if len(parts) == 2 else b""
    return Frame(
        epoch, Incarnation(sender), Incarnation(receiver), number, acknowledged, kind, body
    )
