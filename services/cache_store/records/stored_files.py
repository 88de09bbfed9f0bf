"""The record files of the store. Owns recency, pins, removals and the byte limit; does no I/O.

A pinned file is never deleted. A pinned file that must go (cleared, superseded or bad) is pending
removal: its records cannot be located any more, and it is removed when the last pin is released.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from services.cache_store import events, file_names
from services.cache_store.file_names import FileKey, FolderKey
from services.cache_store.records import index
from services.cache_store.records.index import IndexedFile, RecordIndex
from shared.identifiers import PeerId
from shared.messages import BlockPlace, StoredFolder, WrittenRecord

QUARANTINED_MAX = 16
"""Most quarantined files that are kept for inspection; the oldest are deleted."""

Removal = Literal["delete", "quarantine"]


class FilePins:
    """Files that stay on disk because a query of a peer has located records in them (pins).

    The peer may read them until it releases the query.
    """

    def __init__(self) -> None:
        self._queries: dict[tuple[PeerId, int], frozenset[FileKey]] = {}
        self._counts: Counter[FileKey] = Counter()

    def __contains__(self, key: FileKey) -> bool:
        """Return True while any query has pinned a file."""
        return key in self._counts

    def __iter__(self) -> Iterator[FileKey]:
        """Iterate over the pinned files."""
        return iter(self._counts)

    def pin(self, peer: PeerId, query_id: int, keys: Iterable[FileKey]) -> list[FileKey]:
        """Pin files for a query, in place of those that a query of this id has pinned before.

        Args:
            peer: the rank that sent the query.
            query_id: its number for the query.
            keys: the files in which records were located.

        Returns:
            Files of the earlier query that no query pins any more, sorted.
        """
        files = frozenset(keys)
        self._counts.update(files)
        freed = self.release(peer, query_id)
        if files:
            self._queries[peer, query_id] = files
        return freed

    def release(self, peer: PeerId, query_id: int) -> list[FileKey]:
        """Release a query's pins; return those of its files that no query pins any more, sorted."""
        freed = []
        for key in self._queries.pop((peer, query_id), ()):
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                freed.append(key)
        return sorted(freed)

    def release_all(self, peer: PeerId) -> list[FileKey]:
        """Release the pins of all of a peer's queries; return the files that no query pins now."""
        numbers = [query_id for owner, query_id in self._queries if owner == peer]
        return [key for query_id in numbers for key in self.release(peer, query_id)]


class StoredFiles:
    """All record and quarantined files of the directory: finds, pins, evicts and removes them."""

    def __init__(self, actions: list[events.Action], counters: dict[str, float]) -> None:
        """Start without files.

        Args:
            actions: the core's actions, to which file operations are appended.
            counters: the core's counters.
        """
        self.bytes_max = 0
        self.index = RecordIndex()
        self.pins = FilePins()
        self._actions = actions
        self._counters = counters
        self._pending_removal: dict[FileKey, tuple[int, Removal]] = {}
        """Bytes and kind of removal of pinned files that are removed when they are released."""
        self._quarantined: dict[str, int] = {}
        """Bytes by name, oldest first."""
        self._is_open = False

    @property
    def bytes_used(self) -> int:
        """Bytes of all files of the store, without partial files."""
        pending = sum(size for size, _ in self._pending_removal.values())
        return self.index.size_bytes + pending + sum(self._quarantined.values())

    def load(self, opened: events.DirectoryOpened, now_s: float) -> None:
        """Replace all files by those of a scan; pins of connected peers stay.

        Bad files are quarantined, and files beyond the size limit are evicted.

        Args:
            opened: the result of the scan, with the size limit.
            now_s: the time in monotonic seconds; a file's age is subtracted to get the time of its
                last use.
        """
        pending, self._pending_removal = self._pending_removal, {}
        self.index = RecordIndex()
        self._is_open = True
        self._quarantined = dict(opened.quarantined)
        self.bytes_max = opened.bytes_max
        for file in sorted(opened.files, key=_oldest_first):
            if file.key in pending:
                self._remove(file.key, file.size_bytes, pending[file.key][1])
            else:
                self.add(file.key, file.size_bytes, file.records, now_s - file.age_s)
        for bad in opened.bad_files:
            self._remove(bad.key, bad.size_bytes, "quarantine")
            self.count_quarantined(bad.cause)
        self.make_room(0, ())

    def unload(self) -> None:
        """Forget all files without deleting any; pins and pending removals stay."""
        self.index = RecordIndex()
        self._is_open = False
        self._quarantined = {}

    def add(
        self, key: FileKey, size_bytes: int, records: Iterable[WrittenRecord], used_at_s: float
    ) -> None:
        """Index a file as the most recently used; delete each file whose last record it supersedes.

        Args:
            key: folder and name.
            size_bytes: length of the file.
            records: its records.
            used_at_s: time of its latest use, in monotonic seconds.
        """
        for superseded in self.index.add(key, size_bytes, records, used_at_s):
            self._remove(superseded.key, superseded.size_bytes, "delete")

    def locate(
        self,
        peer: PeerId,
        query_id: int,
        folder: FolderKey,
        hashes: Sequence[bytes],
        now_s: float,
    ) -> list[BlockPlace | None]:
        """Find records for a peer; pin their files and mark them as used.

        Args:
            peer: the rank that will read.
            query_id: its number for the query, with which it releases the pins.
            folder: its folder.
            hashes: block hashes of the records, in the order of the blocks.
            now_s: the time in monotonic seconds.

        Returns:
            The place of each record in the order of `hashes`; None for one that is not stored.
        """
        files = [self.index.find(folder, block_hash) for block_hash in hashes]
        # Later blocks are useless without those before them, so they count as used earlier.
        keys = tuple(dict.fromkeys(file.key for file in reversed(files) if file is not None))
        for key in keys:
            self.index.touch(key, now_s)
        if keys:
            self._actions.append(events.TouchFiles(keys))
        self._remove_released(self.pins.pin(peer, query_id, keys))
        return [
            index.place(file, block_hash) if file is not None else None
            for file, block_hash in zip(files, hashes, strict=True)
        ]

    def release(self, peer: PeerId, query_id: int) -> None:
        """Release the pins of a query, and carry out the file removals that waited for them."""
        self._remove_released(self.pins.release(peer, query_id))

    def release_all(self, peer: PeerId) -> None:
        """Release all pins of a peer, and carry out the file removals that waited for them."""
        self._remove_released(self.pins.release_all(peer))

    def can_make_room(self, size_bytes: int) -> bool:
        """Return True when `size_bytes` fit below the limit once only pinned files are left."""
        indexed = (file for key in self.pins if (file := self.index.get(key)) is not None)
        pending = sum(size for size, _ in self._pending_removal.values())
        return sum(file.size_bytes for file in indexed) + pending + size_bytes <= self.bytes_max

    def make_room(self, size_bytes: int, evict_first: Sequence[IndexedFile]) -> bool:
        """Evict files until `size_bytes` more fit below the limit.

        In this order: quarantined files, `evict_first`, then the least recently used. Pinned files
        stay.

        Args:
            size_bytes: bytes needed; 0: only return below the limit, as far as pins allow.
            evict_first: files to evict before others, in this order.

        Returns:
            False, and nothing is evicted, when the bytes cannot fit.
        """
        excess = self.bytes_used + size_bytes - self.bytes_max
        if excess <= 0:
            return True
        old = list(self._quarantined.items())
        while old and excess > 0:
            excess -= old.pop(0)[1]
        victims: dict[FileKey, IndexedFile] = {}
        for file in itertools.chain(evict_first, self.index):
            if excess <= 0:
                break
            if file.key not in self.pins and file.key not in victims:
                victims[file.key] = file
                excess -= file.size_bytes
        if excess > 0 and size_bytes:
            return False
        for name in list(self._quarantined)[: len(self._quarantined) - len(old)]:
            self._drop_quarantined(name)
        for file in victims.values():
            self._delete(file, "evicted")
        return True

    def expire(self, used_before_s: float) -> int:
        """Delete the files that were last used before a time; pinned ones stay.

        Args:
            used_before_s: that time, in monotonic seconds.

        Returns:
            The number of deleted files.
        """
        old = itertools.takewhile(lambda file: file.used_at_s < used_before_s, self.index)
        expired = [file for file in old if file.key not in self.pins]
        for file in expired:
            self._delete(file, "expired")
        return len(expired)

    def evictable(self, folder: FolderKey, hashes: Sequence[bytes]) -> list[IndexedFile]:
        """Return the files whose records are all in `hashes`, in the order in which to evict them.

        Args:
            folder: their folder.
            hashes: block hashes of records that may be evicted, the least valuable first.

        Returns:
            The files, in the order of the last of their records in `hashes`.
        """
        named: dict[FileKey, int] = {}
        for block_hash in dict.fromkeys(hashes):
            file = self.index.find(folder, block_hash)
            if file is not None:
                # Each record moves its file to the end: its last record is worth the most.
                named[file.key] = named.pop(file.key, 0) + 1
        files = ((self.index.get(key), count) for key, count in named.items())
        return [file for file, count in files if file is not None and count == len(file.records)]

    def quarantine(self, folder: FolderKey, hashes: Iterable[bytes], cause: str) -> int:
        """Move the files that hold these records into the quarantine; return the number of files.

        The other records of a file go with it. An older copy of a record is located from then on;
        ranks check it when they read it. The cause is `<word>: <sentence>`.
        """
        files = [self.index.find(folder, block_hash) for block_hash in hashes]
        keys = {file.key for file in files if file is not None}
        for key in sorted(keys):
            file = self.index.remove(key)
            assert file is not None
            self._remove(key, file.size_bytes, "quarantine")
            self.count_quarantined(cause)
        return len(keys)

    def count_quarantined(self, cause: str) -> None:
        """Count a quarantined file under the word before the colon in its cause, or as "other"."""
        word = cause.partition(":")[0]
        known = word if word in {"torn", "damaged", "version", "identity"} else "other"
        self._counters[f"quarantined_{known}_total"] += 1

    def clear(self, namespace: str) -> tuple[int, int]:
        """Delete the files of a namespace, or all files for "".

        Returns:
            The number of deleted records, and the bytes of their files.
        """
        files = [f for f in self.index if namespace in ("", f.key.folder.namespace)]
        records = sum(len(file.records) for file in files)
        for file in files:
            self.index.remove(file.key)
            self._remove(file.key, file.size_bytes, "delete")
        if not namespace:
            for name in list(self._quarantined):
                self._drop_quarantined(name)
        return records, sum(f.size_bytes for f in files)

    def forget_missing(self, key: FileKey) -> None:
        """Forget a file that another program has deleted."""
        self._pending_removal.pop(key, None)
        if self.index.remove(key) is not None:
            self._counters["missing_files_total"] += 1

    def free_name(self, folder: FolderKey, first_hash: bytes) -> FileKey:
        """Return a key for a new file with this first record, whose name no file in use has."""
        for name in file_names.file_names(first_hash):
            key = FileKey(folder, name)
            if key not in self.index and key not in self._pending_removal:
                return key
        raise AssertionError("file names do not end")

    def is_empty(self, folder: FolderKey) -> bool:
        """Return True when a folder has no record file."""
        return not self.index.file_count(folder) and all(
            key.folder != folder for key in self._pending_removal
        )

    def list_folders(self, now_s: float) -> list[StoredFolder]:
        """Return records, bytes and seconds since the last use of each folder, sorted by folder."""
        by_folder: defaultdict[FolderKey, list[IndexedFile]] = defaultdict(list)
        for file in self.index:
            by_folder[file.key.folder].append(file)
        return [
            StoredFolder(
                **folder._asdict(),
                records=sum(len(file.records) for file in files),
                size_bytes=sum(file.size_bytes for file in files),
                used_s=max(0.0, now_s - max(file.used_at_s for file in files)),
            )
            for folder, files in sorted(by_folder.items())
        ]

    def check_invariants(self) -> None:
        """Raise AssertionError when index, pins and removals disagree."""
        self.index.check_invariants()
        for key in self._pending_removal:
            assert key in self.pins or not self._is_open, key
            assert key not in self.index, key
        assert len(self._quarantined) <= QUARANTINED_MAX

    def _delete(self, file: IndexedFile, cause: Literal["evicted", "expired"]) -> None:
        """Remove an indexed file from index and disk, and count it under its cause."""
        records = self.index.record_count
        self.index.remove(file.key)
        self._counters[f"{cause}_files_total"] += 1
        self._counters[f"{cause}_records_total"] += records - self.index.record_count
        self._counters[f"{cause}_bytes_total"] += file.size_bytes
        self._remove(file.key, file.size_bytes, "delete")

    def _remove_released(self, keys: Iterable[FileKey]) -> None:
        for key in keys:
            if key in self._pending_removal and self._is_open:
                size_bytes, removal = self._pending_removal.pop(key)
                self._remove(key, size_bytes, removal)

    def _remove(self, key: FileKey, size_bytes: int, removal: Removal) -> None:
        """Delete or quarantine a file that is not indexed, now or when it is released."""
        if key in self.pins:
            self._pending_removal[key] = (size_bytes, removal)
        elif removal == "delete":
            self._actions.append(events.DeleteFile(key))
        else:
            name = file_names.quarantined_name(key)
            self._actions.append(events.QuarantineFile(key, name))
            self._quarantined.pop(name, None)
            self._quarantined[name] = size_bytes
            for old in list(self._quarantined)[:-QUARANTINED_MAX]:
                self._drop_quarantined(old)

    def _drop_quarantined(self, name: str) -> None:
        del self._quarantined[name]
        self._actions.append(events.DropQuarantined(name))


def _oldest_first(file: events.FoundFile) -> tuple[float, FileKey]:
    return (-file.age_s, file.key)
