"""Packed token ids. Owns their form in messages and in memory: four bytes per id, in order."""

import array
import sys
from collections.abc import Iterable

BYTES_PER_ID = 4
"""A token id is packed as a little-endian int32."""


def pack(ids: Iterable[int]) -> bytes:
    """Return token ids as bytes.

    Raises:
        OverflowError: when an id does not fit an int32.
    """
    packed = ids if isinstance(ids, array.array) else array.array("i", ids)
    return _in_message_order(packed).tobytes()


def unpack(packed: bytes) -> "array.array[int]":
    """Return the token ids in bytes as an array of four bytes per id.

    Raises:
        ValueError: when the bytes are not a whole number of ids.
    """
    ids = array.array("i")
    ids.frombytes(packed)
    return _in_message_order(ids)


def all_below(ids: "array.array[int]", size: int) -> bool:
    """Tell whether all ids of an array that is not empty are at least 0 and below `size`."""
    # Read without its sign, a negative id is larger than every valid one.
    return max(memoryview(ids).cast("B").cast("I")) < size


def _in_message_order(ids: "array.array[int]") -> "array.array[int]":
    if sys.byteorder == "little":
        return ids
    swapped = ids[:]
    swapped.byteswap()
    return swapped
