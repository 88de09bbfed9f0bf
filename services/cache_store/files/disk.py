"""Performing what the core orders in the directory, and saying what came of it."""

import contextlib
import errno
import os
import time
from pathlib import Path

from services.cache_store import file_names
from services.cache_store.events import (
    DeleteFile,
    DeletePartials,
    DirectoryOpened,
    DirectoryUnusable,
    DiskAction,
    DropQuarantined,
    Event,
    FileInspected,
    FileMissing,
    FileTaken,
    InspectFile,
    MakeFolder,
    ProbeDirectory,
    QuarantineFile,
    RemoveFolder,
    TakeOverFile,
    TouchFiles,
)
from services.cache_store.file_names import FileKey, FolderKey
from services.cache_store.files.directory import Directory
from services.cache_store.files.scan import read_records
from shared.block_record import RecordUnreadable
from shared.errors import ConfigError


class Disk:
    """One directory's files. An error of the disk becomes DirectoryUnusable, never an exception."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._root = directory.path
        self._touched_ns = 0

    def open(self) -> DirectoryOpened | DirectoryUnusable:
        """Open the directory; takes as long as reading all headers takes."""
        try:
            return self._directory.open()
        except ConfigError as error:
            return DirectoryUnusable(str(error))
        except OSError as error:
            return DirectoryUnusable(_sentence(error))

    def perform(self, order: DiskAction) -> list[Event]:
        """Perform one order; return what the core must hear of it, in order."""
        try:
            return self._perform(order)
        except OSError as error:
            cause = _sentence(error)
            answers: list[Event] = [DirectoryUnusable(cause)]
            match order:
                case InspectFile():
                    answers.append(FileInspected(order, 0, (), cause))
                case TakeOverFile():
                    answers.append(FileTaken(order, cause))
                case _:
                    pass
            return answers

    def _perform(self, order: DiskAction) -> list[Event]:
        match order:
            case ProbeDirectory():
                self._directory.probe()
            case InspectFile():
                return [self._inspect(order)]
            case TakeOverFile():
                return [self._take_over(order)]
            case TouchFiles():
                return [FileMissing(key) for key in order.keys if not self._touch(key)]
            case DeleteFile():
                with contextlib.suppress(FileNotFoundError):
                    self._path(order.key).unlink()
            case QuarantineFile():
                return self._quarantine(order)
            case DropQuarantined():
                with contextlib.suppress(FileNotFoundError):
                    (self._root / file_names.QUARANTINE / order.name).unlink()
            case MakeFolder():
                self._make(order.folder.namespace)
                self._make(order.folder.path)
            case RemoveFolder():
                self._remove(order.folder)
            case DeletePartials():
                self._delete_partials(order)
        return []

    def _inspect(self, order: InspectFile) -> FileInspected:
        path = self._path(FileKey(order.folder, order.commit.name))
        try:
            facts, records = read_records(path, order.folder)
        except FileNotFoundError:
            return FileInspected(order, 0, (), "There is no such file.")
        except RecordUnreadable as error:
            return FileInspected(order, 0, (), str(error))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return FileInspected(order, 0, (), "It is a link.")
        return FileInspected(order, facts.st_size, tuple(records), "")

    def _take_over(self, order: TakeOverFile) -> FileTaken:
        path = self._path(FileKey(order.key.folder, order.commit.name))
        try:
            path.rename(self._path(order.key))
        except FileNotFoundError:
            return FileTaken(order, "The file has vanished.")
        except IsADirectoryError:
            return FileTaken(order, "A folder that is not ours has the name that it should get.")
        self._touch(order.key)
        return FileTaken(order, "")

    def _quarantine(self, order: QuarantineFile) -> list[Event]:
        self._make(file_names.QUARANTINE)
        path = self._root / file_names.QUARANTINE / order.name
        try:
            self._path(order.key).rename(path)
        except FileNotFoundError:
            return [FileMissing(order.key)]
        os.utime(path, ns=(self._now_ns(), self._now_ns()))
        return []

    def _touch(self, key: FileKey) -> bool:
        """Note in the file itself that it was used, later than any before it; False: gone."""
        now_ns = self._now_ns()
        try:
            os.utime(self._path(key), ns=(now_ns, now_ns), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _now_ns(self) -> int:
        # The wall clock, since it is compared with files of earlier processes; a microsecond
        # apart, since not every file system keeps finer times.
        self._touched_ns = max(time.time_ns(), self._touched_ns + 1_000)
        return self._touched_ns

    def _make(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            (self._root / path).mkdir(0o700)

    def _remove(self, folder: FolderKey) -> None:
        # What is not empty, or gone already, stays as it is.
        with contextlib.suppress(OSError):
            (self._root / folder.path).rmdir()
            (self._root / folder.namespace).rmdir()

    def _delete_partials(self, order: DeletePartials) -> None:
        newest_ns = time.time_ns() - int(order.unused_s * 1e9)
        try:
            entries = os.scandir(self._root / order.folder.path)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                if not file_names.is_partial(entry.name) or not entry.is_file(
                    follow_symlinks=False
                ):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime_ns <= newest_ns:
                        Path(entry.path).unlink()

    def _path(self, key: FileKey) -> Path:
        return self._root / key.folder.path / key.name


def _sentence(error: OSError) -> str:
    return f"The directory cannot be used: {error.strerror or error}."
