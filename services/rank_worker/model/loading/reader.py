"""Reads parts of weight files into memory, large ones in several threads. No MLX."""

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

from services.rank_worker.model.loading.reads import BLOCK_BYTES, Read, reads
from services.rank_worker.model.loading.strided import Strided
from shared.errors import ConfigError
from shared.model.checkpoint_files import WeightFile

READERS = 4
"""Threads: enough to keep an SSD busy, and few enough to leave memory bandwidth to the others."""

Bytes = npt.NDArray[np.uint8]
Place = tuple[int, int]
"""Of a stored tensor: the index of its file, and where in the file it begins."""


class Reader:
    """Reads for any thread; `with` ends its own threads."""

    def __init__(self, files: Sequence[WeightFile], places: Sequence[Place]) -> None:
        self._files = files
        self._places = places
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[int, ...]] = {}
        """What a file was when it was first opened."""
        self._scratch = threading.local()
        self._pool = ThreadPoolExecutor(READERS, "weights")
        self.bytes_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, array: Strided, target: memoryview) -> None:
        """Read an array into memory.

        Args:
            array: of stored tensors.
            target: writable bytes, as many as the array has.

        Raises:
            ConfigError: a file cannot be read, is shorter than it was or has been changed.
        """
        memory = np.frombuffer(target, np.uint8)
        first, *others = self._bundles(reads(array))
        parts = [self._pool.submit(self._read_all, *bundle, memory) for bundle in others]
        # Nobody else may write to the memory of a caller who has been told of an error.
        try:
            self._read_all(*first, memory)
        finally:
            wait(parts)
        for part in parts:
            part.result()

    def check_unchanged(self) -> None:
        """Look at every file once more.

        Raises:
            ConfigError: one has been changed since it was first opened.
        """
        for index in self._seen:
            with self._opened(index):
                pass

    def _bundles(self, parts: Iterable[Read]) -> Iterator[tuple[int, list[Read]]]:
        """Yield reads of one file that make a block together."""
        bundle: list[Read] = []
        file, size = -1, 0
        for part in parts:
            place = self._places[part.source][0]
            if bundle and (place != file or size + part.span_bytes > BLOCK_BYTES):
                yield file, bundle
                bundle, size = [], 0
            file = place
            bundle.append(part)
            size += part.span_bytes
        if bundle:
            yield file, bundle

    def _read_all(self, file: int, parts: list[Read], memory: Bytes) -> None:
        with self._opened(file) as stream:
            for part in parts:
                offset = self._places[part.source][1] + part.offset
                if part.axes:
                    self._gather(stream, part, offset, memory)
                else:
                    _fill(stream, offset, memory[part.target : part.target + part.run_bytes])
        with self._lock:
            self.bytes_read += sum(part.span_bytes for part in parts)

    def _gather(self, stream: FileIO, part: Read, offset: int, memory: Bytes) -> None:
        """Read with the gaps, and copy what lies between them."""
        scratch = getattr(self._scratch, "bytes", None)
        if scratch is None:
            scratch = self._scratch.bytes = np.empty(BLOCK_BYTES, np.uint8)
        block = scratch[: part.span_bytes]
        _fill(stream, offset, block)
        word = _word(part)
        shape = (*(axis[0] for axis in part.axes), part.run_bytes // word.itemsize)
        apart = (*(axis[1] for axis in part.axes), word.itemsize)
        to = (*(axis[2] for axis in part.axes), word.itemsize)
        np.copyto(
            np.ndarray(shape, word, memory, part.target, to),
            np.ndarray(shape, word, block, 0, apart),
        )

    @contextmanager
    def _opened(self, index: int) -> Iterator[FileIO]:
        """Open a file for as long as it is read: models have more files than a process may open."""
        file = self._files[index]
        try:
            with FileIO(file.path) as stream:
                self._check(index, stream)
                yield stream
        except OSError as error:
            raise ConfigError(f"Cannot read {file.path}: {error.strerror}.") from None

    def _check(self, index: int, stream: FileIO) -> None:
        """Hold that a file is what it was when its header was read.

        Raises:
            ConfigError: it is another.
        """
        file = self._files[index]
        facts = os.fstat(stream.fileno())
        now = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        with self._lock:
            known = self._seen.get(index)
        if known is None:
            header = np.empty(len(file.header), np.uint8)
            _fill(stream, 8, header)
            is_same = facts.st_size == file.size_bytes and header.tobytes() == file.header
            with self._lock:
                known = self._seen.setdefault(index, now)
        else:
            is_same = True
        if known != now or not is_same:
            raise _changed(file.path)


def _fill(stream: FileIO, offset: int, target: Bytes) -> None:
    """Fill memory from an offset of a file on.

    Raises:
        ConfigError: the file ends before.
    """
    stream.seek(offset)
    rest = target.data
    while rest:
        count = stream.readinto(rest)
        if not count:
            raise _changed(Path(str(stream.name)))
        rest = rest[count:]


def _word(part: Read) -> np.dtype[np.unsignedinteger]:
    """Return the widest type that a read's runs can be copied in."""
    numbers = (part.target, part.run_bytes, *(n for axis in part.axes for n in axis[1:]))
    for size in (8, 4, 2):
        if all(number % size == 0 for number in numbers):
            return np.dtype(f"u{size}")
    return np.dtype(np.uint8)


def _changed(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} changed while it was read: start again when nothing writes to the model's folder."
    )
