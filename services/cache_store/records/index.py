"""The index of records and files. Owns recency of use; does no I/O. Rebuilt at every start.

A file is used when one of its records is, and is evicted as a whole.
"""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from services.cache_store.file_names import FileKey, FolderKey
from shared.messages import BlockPlace, WrittenRecord


@dataclasses.dataclass(slots=True)
class IndexedFile:
    """A record file in the index."""

    key: FileKey
    size_bytes: int
    used_at_s: float
    """Time of its latest use, in monotonic seconds."""
    records: dict[bytes, WrittenRecord]
    """Records that are located in this file."""
    superseded: dict[bytes, WrittenRecord] = dataclasses.field(default_factory=dict)
    """Records that a newer file has too, and that are located there while it exists."""


class RecordIndex:
    """The record files in order of use, and for each folder and hash the file with the record."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.record_count = 0
        self._files: OrderedDict[FileKey, IndexedFile] = OrderedDict()
        """Least recently used first."""
        self._records: dict[FolderKey, dict[bytes, IndexedFile]] = {}
        self._older: dict[tuple[FolderKey, bytes], dict[FileKey, IndexedFile]] = {}
        """Files in which a record is superseded, oldest first."""
        self._file_counts: Counter[FolderKey] = Counter()

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def __iter__(self) -> Iterator[IndexedFile]:
        """Iterate over all files, least recently used first."""
        return iter(self._files.values())

    def __contains__(self, key: FileKey) -> bool:
        """Return True when a file is indexed."""
        return key in self._files

    def get(self, key: FileKey) -> IndexedFile | None:
        """Return a file; None when it is not indexed."""
        return self._files.get(key)

    def file_count(self, folder: FolderKey) -> int:
        """Return the number of files in a folder."""
        return self._file_counts[folder]

    def records_in(self, folder: FolderKey) -> int:
        """Return the number of records in a folder."""
        return len(self._records.get(folder, ()))

    def folders(self) -> set[FolderKey]:
        """Return the folders that have records."""
        return set(self._records)

    def add(
        self, key: FileKey, size_bytes: int, records: Iterable[WrittenRecord], used_at_s: float
    ) -> list[IndexedFile]:
        """Add a file as the most recently used one.

        Its records supersede those of the same hash in older files of the folder.

        Args:
            key: folder and name.
            size_bytes: length of the file.
            records: its records, in any order.
            used_at_s: time of its latest use, in monotonic seconds.

        Returns:
            The files that are left without records; they are not indexed any more.
        """
        assert key not in self._files, key
        file = IndexedFile(key, size_bytes, used_at_s, {record.hash: record for record in records})
        emptied = []
        by_hash = self._records.setdefault(key.folder, {}) if file.records else {}
        for block_hash in file.records:
            before = by_hash.get(block_hash)
            by_hash[block_hash] = file
            if before is None:
                self.record_count += 1
                continue
            before.superseded[block_hash] = before.records.pop(block_hash)
            self._older.setdefault((key.folder, block_hash), {})[before.key] = before
            if not before.records:
                emptied.append(before)
        self._files[key] = file
        self._file_counts[key.folder] += 1
        self.size_bytes += size_bytes
        for one in emptied:
            self.remove(one.key)
        return emptied

    def remove(self, key: FileKey) -> IndexedFile | None:
        """Remove a file from the index; return it, or None when it is not indexed.

        A record that an older file has too is located there again, as after a restart.
        """
        file = self._files.pop(key, None)
        if file is None:
            return None
        self._file_counts[key.folder] -= 1
        self.size_bytes -= file.size_bytes
        by_hash = self._records.get(key.folder, {})
        for block_hash in file.superseded:
            self._forget_older(file, block_hash)
        for block_hash in file.records:
            older = self._older.get((key.folder, block_hash))
            if older:
                newest = older[next(reversed(older))]
                self._forget_older(newest, block_hash)
                newest.records[block_hash] = newest.superseded.pop(block_hash)
                by_hash[block_hash] = newest
            else:
                del by_hash[block_hash]
                self.record_count -= 1
        if not by_hash:
            self._records.pop(key.folder, None)
        return file

    def _forget_older(self, file: IndexedFile, block_hash: bytes) -> None:
        place = file.key.folder, block_hash
        del self._older[place][file.key]
        if not self._older[place]:
            del self._older[place]

    def find(self, folder: FolderKey, block_hash: bytes) -> IndexedFile | None:
        """Return the file in which a record is located; None when it is not stored."""
        return self._records.get(folder, {}).get(block_hash)

    def touch(self, key: FileKey, now_s: float) -> None:
        """Make an indexed file the most recently used one, at `now_s` (monotonic seconds)."""
        self._files[key].used_at_s = now_s
        self._files.move_to_end(key)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the sums and tables by folder and hash match the files."""
        assert self.size_bytes == sum(file.size_bytes for file in self)
        assert self.record_count == sum(len(file.records) for file in self)
        assert self.record_count == sum(len(by_hash) for by_hash in self._records.values())
        for file in self:
            for block_hash in file.records:
                assert self._records[file.key.folder][block_hash] is file
            for block_hash in file.superseded:
                assert block_hash not in file.records
                assert self._older[file.key.folder, block_hash][file.key] is file
        assert sum(map(len, self._older.values())) == sum(len(file.superseded) for file in self)
        assert all(self.find(*place) is not None for place in self._older)
        assert all(self._records.values())
        assert +self._file_counts == Counter(file.key.folder for file in self)


def place(file: IndexedFile, block_hash: bytes) -> BlockPlace:
    """Return where a record lies in a file (name, offset, length), as sent to ranks."""
    record = file.records[block_hash]
    return BlockPlace(name=file.key.name, offset=record.offset, size_bytes=record.size_bytes)
