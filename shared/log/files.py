"""Log files. Owns their rotation by size, their reopening, and reading them in order.

The standard library's handler rotates by size, and another one reopens a file that was moved, but
none does both or takes over what libraries print.
"""

import contextlib
import heapq
import logging
import os
import time
from collections.abc import Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO

from shared.configuration.settings import LogConfig
from shared.errors import ConfigError
from shared.log import lines
from shared.log.lines import Line

SUFFIX = ".log"

_FOLDER_MODE = 0o750
_MODE = 0o640
_POLL_INTERVAL_S = 0.2
_STANDARD_OUTPUTS = (1, 2)


class LogFile(RotatingFileHandler):
    """Log file `NAME.log` of at most `log.file_bytes_max`; the full ones are NAME.log.1, .2 and on.

    A file that something else has moved or deleted is opened again at the next line. Failing writes
    are ignored, because a full disk must not stop a process that serves.
    """

    def __init__(
        self, folder: Path, name: str, config: LogConfig, *, takes_output: bool = False
    ) -> None:
        """Make the folder if it is missing, and open the file.

        Args:
            folder: folder of the log files.
            name: name of the process, such as `rank-0`.
            config: bounds of the files.
            takes_output: whether standard output and standard error of this process go to the file
                too, with all that libraries print and a crash leaves behind.

        Raises:
            ConfigError: when the file cannot be written.
        """
        self._takes_output = takes_output
        try:
            folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            super().__init__(
                folder / f"{name}{SUFFIX}",
                maxBytes=config.file_bytes_max,
                backupCount=config.files_max - 1,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise ConfigError(
                f"Cannot write the log file {folder / name}{SUFFIX}: {error.strerror}. Choose "
                "another log.directory, or let this user write there."
            ) from None

    def write_line(self, text: str) -> None:
        """Append a line, given without its end."""
        self.handle(logging.makeLogRecord({"msg": text}))

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802 - the library's name
        """Return whether the file is full; open it again first if it is no longer at its path."""
        if self.stream is not None and not self._is_at_its_path():
            self.stream.close()
            self.stream = self._open()
        return bool(super().shouldRollover(record))

    def doRollover(self) -> None:  # noqa: N802 - the library's name
        """Rename the files and begin a new one; continue the full one if that is impossible."""
        with contextlib.suppress(OSError):
            if self.backupCount:
                super().doRollover()
            else:
                # The library would let a file without predecessors grow for ever.
                os.truncate(self.baseFilename, 0)
        if self.stream is None:
            self.stream = self._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Ignore a failed write."""

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        with contextlib.suppress(OSError):
            os.fchmod(stream.fileno(), _MODE)
        if self._takes_output:
            for number in _STANDARD_OUTPUTS:
                os.dup2(stream.fileno(), number)
        return stream

    def _is_at_its_path(self) -> bool:
        try:
            found = Path(self.baseFilename).stat()
        except OSError:
            return False
        return self.stream is not None and os.path.samestat(found, os.fstat(self.stream.fileno()))


def names(folder: Path) -> list[str]:
    """Return the names of the processes that have log files in a folder, sorted.

    Raises:
        OSError: when the folder exists and cannot be read.
    """
    try:
        found = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted({name.partition(SUFFIX)[0] for name in found if SUFFIX in name})


class ProcessLog:
    """The log files of one process, read from the oldest line on and then as they grow."""

    def __init__(self, folder: Path, name: str) -> None:
        """Open the newest file, which need not exist yet.

        Args:
            folder: the folder of the files.
            name: name of the process.
        """
        self._folder = folder
        self._name = name
        self._path = folder / f"{name}{SUFFIX}"
        self._rest = b""
        self._time_s = 0.0
        self._stream = self._open()

    def read_all(self) -> Iterator[Line]:
        """Yield all lines that are in the files now, the oldest first.

        A line that is no log line, such as output of a library, has the time of the one before.
        """
        for path in self._full_files():
            # It may have been renamed or deleted since the folder was read.
            with contextlib.suppress(OSError), path.open("rb") as stream:
                self._time_s = self._time_s or path.stat().st_mtime
                yield from map(self._decode, stream)
        yield from self.read_new()

    def read_new(self) -> Iterator[Line]:
        """Yield the complete lines written since the last call, through a rotation."""
        is_moved = self._is_moved()
        yield from self._read_rest()
        if is_moved:
            self.close()
            self._stream = self._open()
            yield from self._read_rest()

    def close(self) -> None:
        """Close the open file."""
        if self._stream is not None:
            self._stream.close()

    def _full_files(self) -> list[Path]:
        """Return the renamed files, the oldest first, without the one that is open."""
        found = {}
        for path in self._folder.glob(f"{self._path.name}.*"):
            number = path.suffix.removeprefix(".")
            if number.isdecimal() and not self._is_open(path):
                found[int(number)] = path
        return [found[number] for number in sorted(found, reverse=True)]

    def _read_rest(self) -> Iterator[Line]:
        if self._stream is None:
            return
        self._time_s = self._time_s or os.fstat(self._stream.fileno()).st_mtime
        *complete, self._rest = (self._rest + self._stream.read()).split(b"\n")
        yield from map(self._decode, complete)

    def _decode(self, data: bytes) -> Line:
        text = data.decode("utf-8", errors="replace").rstrip("\n")
        line = lines.decode(text, self._name, self._time_s)
        self._time_s = float(line["time"])
        return line

    def _is_moved(self) -> bool:
        """Return whether the path leads to another file than the open one, or a shorter one."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return False
        if self._stream is None:
            return True
        return not self._is_open(self._path) or size < self._stream.tell()

    def _is_open(self, path: Path) -> bool:
        """Return whether the open file is the one at a path."""
        if self._stream is None:
            return False
        try:
            return os.path.samestat(path.stat(), os.fstat(self._stream.fileno()))
        except OSError:
            return False

    def _open(self) -> BinaryIO | None:
        try:
            return self._path.open("rb")
        except OSError:
            return None


class HostLog:
    """The log files of all processes in a folder, as one log in order of time."""

    def __init__(self, folder: Path) -> None:
        """Find the files; `close` closes them.

        Args:
            folder: the folder of the files.
        """
        self._folder = folder
        self._logs: dict[str, ProcessLog] = {}

    def read_all(self) -> Iterator[Line]:
        """Yield all lines that are in the files now."""
        self._open_new()
        by_process = [log.read_all() for log in self._logs.values()]
        return heapq.merge(*by_process, key=_time_s)

    def follow(self) -> Iterator[Line]:
        """Yield lines written since `read_all`, those of each poll in order of time, for ever.

        Files of processes that begin to log later are followed too.
        """
        while True:
            self._open_new()
            new = [line for log in self._logs.values() for line in log.read_new()]
            yield from sorted(new, key=_time_s)
            if not new:
                time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Close the files."""
        for log in self._logs.values():
            log.close()

    def _open_new(self) -> None:
        for name in names(self._folder):
            if name not in self._logs:
                self._logs[name] = ProcessLog(self._folder, name)


def _time_s(line: Line) -> float:
    return float(line["time"])
