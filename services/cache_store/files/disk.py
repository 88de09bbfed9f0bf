"""File operations of the cache store. Performs the core's actions; decides nothing."""

import contextlib
import errno
import os
import time
from pathlib import Path

from services.cache_store import events, file_names
from services.cache_store.file_names import DocumentKey, FileKey, FolderKey
from services.cache_store.files import documents
from services.cache_store.files.directory import Directory
from services.cache_store.files.scan import read_records
from shared.block_record import RecordUnreadable
from shared.errors import ConfigError


class Disk:
    """Performs file operations in one directory. A disk error becomes a DirectoryUnusable event."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._root = directory.path
        self._last_touch_ns = 0

    def open(self) -> events.DirectoryOpened | events.DirectoryUnusable:
        """Lock, check and scan the directory, which takes seconds for 100,000 records."""
        try:
            return self._directory.open()
        except ConfigError as error:
            return events.DirectoryUnusable(str(error))
        except OSError as error:
            return events.DirectoryUnusable(_sentence(error))

    def perform(self, action: events.DiskAction) -> list[events.Event]:
        """Perform one action; return its results as events, in order."""
        try:
            return self._perform(action)
        except OSError as error:
            cause = _sentence(error)
            results: list[events.Event] = [events.DirectoryUnusable(cause)]
            match action:
                case events.TakeOverFile():
                    results.append(events.FileTaken(action, cause))
                case events.WriteDocument():
                    results.append(events.DocumentWritten(action, cause))
                case events.LoadDocument():
                    results.append(events.DocumentLoaded(action, None))
                case _:
                    pass
            return results

    def _perform(self, action: events.DiskAction) -> list[events.Event]:
        match action:
            case events.ProbeDirectory():
                self._directory.probe()
            case events.TakeOverFile():
                return [events.FileTaken(action, self._take_over(action))]
            case events.TouchFiles():
                return [events.FileMissing(key) for key in action.keys if not self._touch(key)]
            case events.DeleteFile():
                with contextlib.suppress(FileNotFoundError):
                    self._path(action.key).unlink()
            case events.QuarantineFile():
                return self._quarantine(action)
            case events.DropQuarantined():
                with contextlib.suppress(FileNotFoundError):
                    (self._root / file_names.QUARANTINE / action.name).unlink()
            case events.MakeFolder():
                self._make(action.folder.namespace)
                self._make(action.folder.path)
            case events.RemoveFolder():
                self._remove(action.folder)
            case events.DeletePartials():
                self._delete_partials(action)
            case events.WriteDocument():
                documents.write(self._root, action.key, action.data)
                return [events.DocumentWritten(action, "")]
            case events.LoadDocument():
                return [events.DocumentLoaded(action, self._load_document(action.key))]
            case events.RemoveDocument():
                self._remove_document(action.key)
        return []

    def _take_over(self, action: events.TakeOverFile) -> str:
        """Check and rename a partial file; return why it is refused, "" when it is taken over."""
        folder, commit = action.key.folder, action.commit
        path = self._path(FileKey(folder, commit.name))
        try:
            _, records = read_records(path, folder)
            if records != commit.records:
                return "The file holds other records than those of the commit."
            path.rename(self._path(action.key))
        except FileNotFoundError:
            return "There is no such file."
        except IsADirectoryError:
            return "A foreign folder has the file name that the records need."
        except RecordUnreadable as error:
            return str(error)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return "It is a symbolic link."
        self._touch(action.key)
        return ""

    def _load_document(self, key: DocumentKey) -> bytes | None:
        data = documents.read(self._root, key)
        if data is not None:
            now_ns = self._now_ns()
            os.utime(self._root / key.path, ns=(now_ns, now_ns), follow_symlinks=False)
        return data

    def _remove_document(self, key: DocumentKey) -> None:
        path = self._root / key.path
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        # Fails while the owner has other documents.
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def _quarantine(self, action: events.QuarantineFile) -> list[events.Event]:
        self._make(file_names.QUARANTINE)
        path = self._root / file_names.QUARANTINE / action.name
        try:
            self._path(action.key).rename(path)
        except FileNotFoundError:
            return [events.FileMissing(action.key)]
        os.utime(path, ns=(self._now_ns(), self._now_ns()))
        return []

    def _touch(self, key: FileKey) -> bool:
        """Record a use in the file's modification time; return False when the file is gone."""
        now_ns = self._now_ns()
        try:
            os.utime(self._path(key), ns=(now_ns, now_ns), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _now_ns(self) -> int:
        # Wall clock time is comparable with that of earlier processes. Uses are a microsecond
        # apart because some file systems store no finer times.
        self._last_touch_ns = max(time.time_ns(), self._last_touch_ns + 1_000)
        return self._last_touch_ns

    def _make(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            (self._root / path).mkdir(0o700)

    def _remove(self, folder: FolderKey) -> None:
        # Fails for a folder that is not empty or already gone.
        with contextlib.suppress(OSError):
            (self._root / folder.path).rmdir()
            (self._root / folder.namespace).rmdir()

    def _delete_partials(self, action: events.DeletePartials) -> None:
        newest_ns = time.time_ns() - int(action.unused_s * 1e9)
        try:
            entries = os.scandir(self._root / action.folder.path)
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
