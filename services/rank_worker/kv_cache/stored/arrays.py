"""MLX arrays that records are read into. The only module of the stored tier that uses MLX."""

import io
import time
import weakref
from typing import Any

import mlx.core as mx

SIZE_MAX = 2**31 - 1
"""Largest length of one dimension of an array."""

RELEASE_TIMEOUT_S = 0.5
"""Longest wait for the MLX thread that still holds a file object after a load."""

UNTOUCHED_BYTES = 2 * 1024 * 1024
"""From this size on, memory that was not written before is faster. Blocks of 4 MiB, cold: 2.3 GB/s
against 1.8 GB/s with zeros; of 1 MiB, warm: 2 to 3 GB/s against 3 to 4 GB/s."""


def allocate(size_bytes: int) -> tuple[memoryview, mx.array]:
    """Allocate an evaluated array and return a writable view of its memory.

    `mx.array(bytes)` would copy under the GIL instead: 2 to 40 ms for 16 MiB, during which no step
    could be launched.

    Args:
        size_bytes: the size of the array.

    Returns:
        The view, and the array: uint8 [size_bytes]. Bytes written to the view are the array's.

    Raises:
        RuntimeError: there is no memory, or the size exceeds `SIZE_MAX`.
    """
    if size_bytes > SIZE_MAX:
        raise RuntimeError(f"An array cannot have {size_bytes} bytes; the most is {SIZE_MAX}.")
    array = _untouched(size_bytes) if size_bytes >= UNTOUCHED_BYTES else _zeros(size_bytes)
    view: Any = array
    return memoryview(view), array


def _zeros(size_bytes: int) -> mx.array:
    # On the CPU stream, because the GPU stream would wait for the running step.
    array = mx.empty((size_bytes,), dtype=mx.uint8, stream=mx.cpu)
    mx.eval(array)
    return array


def _untouched(size_bytes: int) -> mx.array:
    file = _Untouched(size_bytes)
    opened: Any = file
    file_ref = weakref.ref(file)
    try:
        # MLX reads an open file immediately, not lazily.
        array: Any = mx.load(opened, format="npy", stream=mx.cpu)
    finally:
        del file, opened
        _wait_for_release(file_ref)
    loaded: mx.array = array
    return loaded


def _wait_for_release(file_ref: weakref.ref[Any]) -> None:
    """Wait until MLX's reading thread has released the file.

    A thread that needs Python while the process ends dies with SIGABRT.
    """
    deadline_s = time.monotonic() + RELEASE_TIMEOUT_S
    while file_ref() is not None and time.monotonic() < deadline_s:
        time.sleep(0.0)


class _Untouched:
    """A file object with an npy header whose reads leave the array's memory untouched."""

    closed = False

    def __init__(self, size_bytes: int) -> None:
        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size_bytes},)}}\n".encode()
        self._header = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        self._size = len(self._header) + size_bytes
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set and return the position. MLX seeks before every read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def readinto(self, target: memoryview) -> int:
        """Copy the part of the header at the position, and report all bytes as read."""
        part = self._header[self._position : self._position + len(target)]
        target[: len(part)] = part
        self._position += len(target)
        return len(target)
