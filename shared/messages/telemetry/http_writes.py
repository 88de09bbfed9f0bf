"""Packed writes of an HTTP response. Owns their form in messages: six uint32 per write."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_WRITE = struct.Struct("<6I")
WRITE_BYTES = _WRITE.size
_MAX = 2**32 - 1


class HttpWrite(NamedTuple):
    """One write of a response to its connection."""

    after_s: float
    """Seconds after the request arrived."""
    seconds: float
    """Duration of the call."""
    size_bytes: int
    tokens: int
    """Tokens whose text is in it, or was held back until it."""
    epoch: int
    step_id: int
    """The last step that generated one of them; zeros: unknown."""


def pack(write: HttpWrite) -> bytes:
    """Return a write as bytes: times in microseconds, all numbers at most 2**32 - 1."""
    return _WRITE.pack(
        _clamp(write.after_s * 1e6),
        _clamp(write.seconds * 1e6),
        _clamp(write.size_bytes),
        _clamp(write.tokens),
        _clamp(write.epoch),
        _clamp(write.step_id),
    )


def unpack(packed: bytes) -> Iterator[HttpWrite]:
    """Yield the writes in a sequence of what `pack` has returned.

    Raises:
        ValueError: when the bytes are not a whole number of writes.
    """
    if len(packed) % WRITE_BYTES:
        raise ValueError(f"A write has {WRITE_BYTES} bytes")
    for after_us, microseconds, *counts in _WRITE.iter_unpack(packed):
        yield HttpWrite(after_us / 1e6, microseconds / 1e6, *counts)


def _clamp(number: float) -> int:
    return max(0, min(_MAX, round(number)))
