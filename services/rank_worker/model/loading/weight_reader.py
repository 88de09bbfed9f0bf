"""Reads slices of weight files into memory, in several threads when there are many. No MLX."""

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from services.rank_worker.model.loading.read_plan import BLOCK_BYTES, FileRead, plan_reads
from services.rank_worker.model.loading.tensor_slices import SlicedArray
from shared.errors import ConfigError
from shared.model.checkpoint_files import WeightFile

READERS = 4
"""Threads: enough to keep an SSD busy without using up the memory bandwidth of other threads."""

Bytes = npt.NDArray[np.uint8]
"""uint8 [bytes]."""
TensorLocation = tuple[int, int]
"""(index of the tensor's file, offset of its first byte in the file)."""


class WeightReader:
    """Reads slices of weight files for any thread, long ones with four threads of its own.

    As a context manager it stops these threads on exit.
    """

    def __init__(self, files: Sequence[WeightFile], locations: Sequence[TensorLocation]) -> None:
        """Open nothing yet.

        Args:
            files: the weight files, with the headers that were read before.
            locations: location of each stored tensor.
        """
        self._files = files
        self._locations = locations
        self._lock = threading.Lock()
        self._identities: dict[int, tuple[int, ...]] = {}
        """(device, inode, size, mtime) of each file when it was first opened."""
        self._scratch = threading.local()
        self._pool = ThreadPoolExecutor(READERS, "weights")
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, array: SlicedArray, target: memoryview) -> None:
        """Read an array into memory, row-major and contiguous.

        Args:
            array: slices of stored tensors.
            target: writable bytes, exactly as many as the array has.

        Raises:
            ConfigError: when a file cannot be read, became shorter or was changed.
        """
        memory = np.frombuffer(target, np.uint8)
        first, *others = self._bundles(plan_reads(array))
        futures = [self._pool.submit(self._read_bundle, *bundle, memory) for bundle in others]
        # After an error the caller may release the memory, so no thread may still write to it.
        try:
            self._read_bundle(*first, memory)
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def check_unchanged(self) -> None:
        """Compare device, inode, size and time of each file read with those at its first opening.

        Raises:
            ConfigError: when they differ: the file was changed or replaced meanwhile.
        """
        for index in self._identities:
            with self._opened(index):
                pass

    def _bundles(self, reads: Iterable[FileRead]) -> Iterator[tuple[int, list[FileRead]]]:
        """Yield (file index, reads of that file), each bundle about one block long."""
        bundle: list[FileRead] = []
        file, size = -1, 0
        for read in reads:
            next_file = self._locations[read.tensor][0]
            if bundle and (next_file != file or size + read.span_bytes > BLOCK_BYTES):
                yield file, bundle
                bundle, size = [], 0
            file = next_file
            bundle.append(read)
            size += read.span_bytes
        if bundle:
            yield file, bundle

    def _read_bundle(self, file: int, reads: list[FileRead], memory: Bytes) -> None:
        with self._opened(file) as stream:
            for read in reads:
                offset = self._locations[read.tensor][1] + read.offset
                if read.axes:
                    self._gather(stream, read, offset, memory)
                else:
                    _read_exactly(
                        stream, offset, memory[read.target : read.target + read.run_bytes]
                    )
        with self._lock:
            self.bytes_read += sum(read.span_bytes for read in reads)

    def _gather(self, stream: FileIO, read: FileRead, offset: int, memory: Bytes) -> None:
        """Read runs with the gaps between them, and copy the runs into memory."""
        scratch = getattr(self._scratch, "bytes", None)
        if scratch is None:
            scratch = self._scratch.bytes = np.empty(BLOCK_BYTES, np.uint8)
        block = scratch[: read.span_bytes]
        _read_exactly(stream, offset, block)
        dtype = _copy_dtype(read)
        shape = (*(axis[0] for axis in read.axes), read.run_bytes // dtype.itemsize)
        file_strides = (*(axis[1] for axis in read.axes), dtype.itemsize)
        memory_strides = (*(axis[2] for axis in read.axes), dtype.itemsize)
        np.copyto(
            np.ndarray(shape, dtype, memory, read.target, memory_strides),
            np.ndarray(shape, dtype, block, 0, file_strides),
        )

    @contextmanager
    def _opened(self, index: int) -> Iterator[FileIO]:
        """Open a file during one read only: a model may have more files than a process may open."""
        file = self._files[index]
        try:
            with FileIO(file.path) as stream:
                self._check(index, stream)
                yield stream
        except OSError as error:
            raise ConfigError(f"Cannot read {file.path}: {error.strerror}.") from None

    def _check(self, index: int, stream: FileIO) -> None:
        """Check that a file is the one whose header was read.

        Raises:
            ConfigError: when it was changed or replaced.
        """
        file = self._files[index]
        stat = os.fstat(stream.fileno())
        identity = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        with self._lock:
            known = self._identities.get(index)
        if known is None:
            header = np.empty(len(file.header), np.uint8)
            _read_exactly(stream, 8, header)
            if stat.st_size != file.size_bytes or header.tobytes() != file.header:
                raise _changed(file.path)
            with self._lock:
                known = self._identities.setdefault(index, identity)
        if known != identity:
            raise _changed(file.path)


def _read_exactly(stream: FileIO, offset: int, target: Bytes) -> None:
    """Fill `target` with the bytes of a file from an offset on.

    Raises:
        ConfigError: when the file is too short.
    """
    stream.seek(offset)
    rest = target.data
    while rest:
        count = stream.readinto(rest)
        if not count:
            raise _changed(Path(str(stream.name)))
        rest = rest[count:]


def _copy_dtype(read: FileRead) -> np.dtype[np.unsignedinteger]:
    """Return the widest unsigned type that divides all distances of a read."""
    numbers = (read.target, read.run_bytes, *(n for axis in read.axes for n in axis[1:]))
    for size in (8, 4, 2):
        if all(number % size == 0 for number in numbers):
            return np.dtype(f"u{size}")
    return np.dtype(np.uint8)


def _changed(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} changed while it was read: start again when nothing writes to the model's folder."
    )
