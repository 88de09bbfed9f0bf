"""Packed writes of an HTTP response. Owns their form in messages: 36 bytes per write."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_WRITE = struct.Struct("<Q3I2Q")
WRITE_BYTES = _WRITE.size


class HttpWrite(NamedTuple):
    """One write of a response to its connection."""

    at_s: float
    """When it was called, by the gateway's monotonic clock."""
    seconds: float
    """Duration of the call."""
    size_bytes: int
    tokens: int
    """Tokens whose text is in it, or was held back until it."""
    epoch: int
    step_id: int
    """The last step that generated one of them; zeros: unknown."""


def pack(
    at_s: float, seconds: float, size_bytes: int, tokens: int, epoch: int, step_id: int
) -> bytes:
    """Return a write as bytes, with times in whole microseconds; the arguments are `HttpWrite`'s.

    A gateway packs thousands a second, so there is no object of each.
    """
    at_us, microseconds = int(at_s * 1e6), int(seconds * 1e6)
    return _WRITE.pack(at_us, microseconds, size_bytes, tokens, epoch, step_id)


def unpack(packed: bytes) -> Iterator[HttpWrite]:
    """Yield the writes in a sequence of what `pack` has returned.

    Raises:
        ValueError: when the bytes are not a whole number of writes.
    """
    if len(packed) % WRITE_BYTES:
        raise ValueError(f"A write has {WRITE_BYTES} bytes")
    for at_us, microseconds, *counts in _WRITE.iter_unpack(packed):
        yield HttpWrite(at_us / 1e6, microseconds / 1e6, *counts)
