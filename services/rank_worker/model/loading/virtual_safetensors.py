"""Loads weights through MLX from a safetensors file that exists only in memory.

MLX allocates the arrays where its device needs them and calls `readinto`, which reads the slices of
the real files directly into that memory. So no copy of a weight is ever held.
"""

import io
import itertools
import json
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.model.loading.graph import WeightOrigin
from services.rank_worker.model.loading.weight_reader import WeightReader
from shared.errors import ConfigError

DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
}
"""Type names of safetensors. Weights of other types are read by MLX itself."""

RELEASE_TIMEOUT_S = 0.5
"""Limit for MLX's threads to release a file that they have finished reading."""


def read_arrays(weights: Sequence[WeightOrigin], reader: WeightReader) -> list[mx.array]:
    """Read weights as they are stored, without the casts.

    Args:
        weights: origins of the weights; their stored types must be in DTYPES.
        reader: reads the slices.

    Returns:
        One evaluated array per weight, with the shape and stored type of its origin.

    Raises:
        ConfigError: when a file cannot be read or was changed.
        RuntimeError: when MLX has no memory.
    """
    errors: list[ConfigError] = []

    def fetch(number: int, target: memoryview) -> None:
        # Errors are kept for the caller, because MLX's threads cannot raise them.
        if errors:
            return
        try:
            reader.read(weights[number].array, target)
        except ConfigError as error:
            errors.append(error)
        except Exception as error:  # noqa: BLE001 - the caller is C++
            errors.append(ConfigError(f"The weights cannot be read: {error!r}."))

    file = _VirtualFile(weights, fetch)
    file_ref = weakref.ref(file)
    opened: Any = file
    try:
        # MLX reads a file object at once, not lazily.
        found: Any = mx.load(opened, format="safetensors")
    finally:
        del file, opened
        _wait_for_release(file_ref)
    if errors:
        raise errors[0]
    return [found[str(number)] for number in range(len(weights))]


def _wait_for_release(file_ref: weakref.ref[Any]) -> None:
    """Wait until MLX's threads have released the file.

    A thread that still needs Python when the interpreter exits would end the process by SIGABRT.
    """
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while file_ref() is not None and time.monotonic() < deadline:
        time.sleep(0.0002)


class _VirtualFile:
    """The interface of an open file as MLX uses it. Each reading thread has its own position."""

    closed = False

    def __init__(
        self, weights: Sequence[WeightOrigin], fetch: Callable[[int, memoryview], None]
    ) -> None:
        ends = list(itertools.accumulate((one.stored_bytes for one in weights), initial=0))
        tensors = {
            str(number): {
                "dtype": DTYPES[weight.dtype],
                "shape": weight.array.shape,
                "data_offsets": ends[number : number + 2],
            }
            for number, weight in enumerate(weights)
        }
        header = json.dumps(tensors).encode()
        self._header = struct.pack("<Q", len(header)) + header
        self._size = len(self._header) + ends[-1]
        self._numbers = {len(self._header) + start: n for n, start in enumerate(ends[:-1])}
        self._position = threading.local()
        self._fetch = fetch

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move this thread's position."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        self._position.at = start + offset
        return start + offset

    def tell(self) -> int:
        """Return this thread's position."""
        at: int = getattr(self._position, "at", 0)
        return at

    def readinto(self, target: memoryview) -> int:
        """Fill `target` from this thread's position with part of the header or with one weight."""
        at, count = self.tell(), len(target)
        if at < len(self._header):
            target[:] = self._header[at : at + count]
        else:
            self._fetch(self._numbers[at], target)
        self.seek(at + count)
        return count
