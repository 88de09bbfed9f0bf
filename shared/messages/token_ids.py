"""Packed token ids. Owns their form in messages and in memory: four bytes per id."""

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4
"""A token id is packed as a little-endian int32."""


def pack(ids: Iterable[int]) -> bytes:
    """Return token ids as bytes.

    Raises:
        OverflowError: when an id does not fit an int32.
    """
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> "array[int]":
    """Return the token ids in bytes, as an array with four bytes per id.

    Raises:
        ValueError: when the bytes are not a whole number of ids.
    """
    ids = array("i")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def all_below(ids: "array[int]", size: int) -> bool:
    """Tell whether all ids of an array that is not empty are at least 0 and below `size`."""
    # Read without its sign, a negative id is larger than every valid one.
    return max(memoryview(ids).cast("B").cast("I")) < size
