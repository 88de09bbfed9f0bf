"""Weights as a safetensors file that exists nowhere: MLX reads it, and gets what readers fetch.

So MLX makes the arrays, in memory that nothing has touched and where its device wants them, and
what is read goes straight there.
"""

import io
import itertools
import json
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from services.rank_worker.model.loading.reader import Reader
from services.rank_worker.model.loading.traced import Traced
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
"""What safetensors calls them; others are not read by parts."""


LET_GO_S = 0.5
"""How long to wait for threads of MLX that have nothing left to do but to let go of a file."""


def read_arrays(weights: Sequence[Traced], reader: Reader) -> list[mx.array]:
    """Read weights, as they are stored; casting is left to do.

    Args:
        weights: of types in DTYPES.
        reader: reads them.

    Returns:
        One array per weight, evaluated.

    Raises:
        ConfigError: a file cannot be read, or was changed.
        RuntimeError: MLX has no memory.
    """
    file = _Opened(weights, reader)
    fetch, is_held = file.fetch, weakref.ref(file)
    opened: Any = file
    try:
        # A file that is given open is read at once.
        found: Any = mx.load(opened, format="safetensors")
    finally:
        del file, opened
        _wait_until_let_go(is_held)
    if fetch.error is not None:
        raise fetch.error
    return [found[str(number)] for number in range(len(weights))]


def _wait_until_let_go(is_held: weakref.ref[Any]) -> None:
    """Wait for threads of MLX that have read and are about to let go of the file.

    One that still wants Python when the interpreter ends would end the process with SIGABRT.
    """
    deadline = time.monotonic() + LET_GO_S
    while is_held() is not None and time.monotonic() < deadline:
        time.sleep(0.0002)


class _Fetch:
    """Reads weights by number until one cannot be read; MLX's threads can take no error."""

    def __init__(self, weights: Sequence[Traced], reader: Reader) -> None:
        self._weights = weights
        self._reader = reader
        self.error: ConfigError | None = None

    def __call__(self, number: int, target: memoryview) -> None:
        if self.error is not None:
            return
        try:
            self._reader.read(self._weights[number].array, target)
        except ConfigError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - above is no Python that could take it
            self.error = ConfigError(f"The weights cannot be read: {error!r}.")


class _Opened:
    """Looks to MLX like an open file. Several of its threads read; each has its own position."""

    closed = False

    def __init__(self, weights: Sequence[Traced], reader: Reader) -> None:
        ends = list(itertools.accumulate((one.stored_bytes for one in weights), initial=0))
        facts = {
            str(number): {
                "dtype": DTYPES[weight.dtype],
                "shape": weight.array.shape,
                "data_offsets": ends[number : number + 2],
            }
            for number, weight in enumerate(weights)
        }
        header = json.dumps(facts).encode()
        self._header = struct.pack("<Q", len(header)) + header
        self._size = len(self._header) + ends[-1]
        self._numbers = {len(self._header) + start: n for n, start in enumerate(ends[:-1])}
        self._position = threading.local()
        self.fetch = _Fetch(weights, reader)

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
        """Fill memory with what is at this thread's position: a part of the header, or a weight."""
        at, count = self.tell(), len(target)
        if at < len(self._header):
            target[:] = self._header[at : at + count]
        else:
            self.fetch(self._numbers[at], target)
        self.seek(at + count)
        return count
