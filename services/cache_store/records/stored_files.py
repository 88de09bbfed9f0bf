"""What the store holds: files by recency, pins, what must go, and the byte limit. Pure.

A pinned file is never deleted. What must go although it is pinned (cleared, superseded, wrong) is
doomed: it cannot be located any more, and goes when it is released.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

from services.cache_store import file_names
from services.cache_store.events import (
    Action,
    DeleteFile,
    DirectoryOpened,
    DropQuarantined,
    FoundFile,
    QuarantineFile,
    TouchFiles,
)
from services.cache_store.file_names import FileKey, FolderKey
from services.cache_store.records import index
from services.cache_store.records.index import IndexedFile, RecordIndex
from services.cache_store.records.pins import FilePins
from shared.identifiers import PeerId
from shared.messages import BlockPlace, StoredFolder, WrittenRecord

QUARANTINED_MAX = 16
"""Files kept for whoever looks into why they are wrong; the newest."""

Fate = Literal["delete", "quarantine"]


class StoredFiles:
    """Every file of ours, and what the store owes to whom."""

    def __init__(self, out: list[Action], counters: dict[str, float]) -> None:
        self.bytes_max = 0
        self.index = RecordIndex()
        self.pins = FilePins()
        self._out = out
        self._counters = counters
        self._doomed: dict[FileKey, tuple[int, Fate]] = {}
        """Bytes and fate of what goes when it is released."""
        self._quarantined: dict[str, int] = {}
        """Bytes by name, oldest first."""
        self._is_open = False

    @property
    def bytes_used(self) -> int:
        """Bytes of everything of ours in the directory, but for what ranks are writing."""
        doomed = sum(size for size, _ in self._doomed.values())
        return self.index.size_bytes + doomed + sum(self._quarantined.values())

    def fill(self, opened: DirectoryOpened, now_s: float) -> None:
        """Begin anew with what lies in the directory; pins of living sessions stay."""
        doomed, self._doomed = self._doomed, {}
        self.index = RecordIndex()
        self._is_open = True
        self._quarantined = dict(opened.quarantined)
        self.bytes_max = opened.bytes_max
        for file in sorted(opened.files, key=_oldest_first):
            if file.key in doomed:
                self._go(file.key, file.size_bytes, doomed[file.key][1])
            else:
                self.add(file.key, file.size_bytes, file.records, now_s - file.age_s)
        for bad in opened.bad_files:
            self._go(bad.key, bad.size_bytes, "quarantine")
            self.count_quarantined(bad.cause)
        self.make_room(0, ())

    def shut(self) -> None:
        """Know of no file any more, and order none to go; pins and dooms stay."""
        self.index = RecordIndex()
        self._is_open = False
        self._quarantined = {}

    def add(
        self, key: FileKey, size_bytes: int, records: Iterable[WrittenRecord], used_at_s: float
    ) -> None:
        """Take up a file as the most recently used; what it supersedes entirely goes."""
        for superseded in self.index.add(key, size_bytes, records, used_at_s):
            self._go(superseded.key, superseded.size_bytes, "delete")

    def locate(
        self,
        peer: PeerId,
        query_id: int,
        folder: FolderKey,
        hashes: Sequence[bytes],
        now_s: float,
    ) -> list[BlockPlace | None]:
        """Return a place or None per hash; what is found is pinned and counts as used."""
        files = [self.index.find(folder, block_hash) for block_hash in hashes]
        # Later blocks are worth nothing without the ones before them, so those are used last.
        keys = tuple(dict.fromkeys(file.key for file in reversed(files) if file is not None))
        for key in keys:
            self.index.touch(key, now_s)
        if keys:
            self._out.append(TouchFiles(keys))
        self._released(self.pins.pin(peer, query_id, keys))
        return [
            index.place(file, block_hash) if file is not None else None
            for file, block_hash in zip(files, hashes, strict=True)
        ]

    def release(self, peer: PeerId, query_id: int) -> None:
        """Unpin what a question has pinned."""
        self._released(self.pins.release(peer, query_id))

    def release_all(self, peer: PeerId) -> None:
        """Unpin everything that a peer has pinned."""
        self._released(self.pins.release_all(peer))

    def make_room(self, size_bytes: int, evict_first: Sequence[FileKey]) -> bool:
        """Evict until so many bytes fit; False, and nothing is evicted, if they never can.

        In this order: the quarantine, `evict_first`, then what was used least recently.
        """
        excess = self.bytes_used + size_bytes - self.bytes_max
        if excess <= 0:
            return True
        old = list(self._quarantined.items())
        while old and excess > 0:
            excess -= old.pop(0)[1]
        victims: dict[FileKey, IndexedFile] = {}
        preferred = (file for key in evict_first if (file := self.index.get(key)) is not None)
        for file in itertools.chain(preferred, self.index):
            if excess <= 0:
                break
            if file.key not in self.pins and file.key not in victims:
                victims[file.key] = file
                excess -= file.size_bytes
        if excess > 0 and size_bytes:
            return False
        for name in list(self._quarantined)[: len(self._quarantined) - len(old)]:
            self._drop_quarantined(name)
        for key, file in victims.items():
            records = self.index.record_count
            self.index.remove(key)
            self._counters["evicted_files_total"] += 1
            self._counters["evicted_records_total"] += records - self.index.record_count
            self._counters["evicted_bytes_total"] += file.size_bytes
            self._go(key, file.size_bytes, "delete")
        return True

    def evictable(self, folder: FolderKey, hashes: Sequence[bytes]) -> list[FileKey]:
        """Return the files all of whose records are named, by the place of their last one."""
        found: dict[FileKey, IndexedFile] = {}
        named: dict[FileKey, int] = {}
        for block_hash in dict.fromkeys(hashes):
            file = self.index.find(folder, block_hash)
            if file is not None:
                # The last one named moves its file to the end: that record is worth the most.
                named[file.key] = named.pop(file.key, 0) + 1
                found[file.key] = file
        return [key for key, count in named.items() if count == len(found[key].records)]

    def quarantine(self, folder: FolderKey, hashes: Iterable[bytes], cause: str) -> int:
        """Take away the files in which these are located; return how many.

        Their neighbours go too. What an older file has of them is located there, and is read with
        as little trust.
        """
        files = [self.index.find(folder, block_hash) for block_hash in hashes]
        keys = {file.key for file in files if file is not None}
        for key in sorted(keys):
            file = self.index.remove(key)
            assert file is not None
            self._go(key, file.size_bytes, "quarantine")
            self.count_quarantined(cause)
        return len(keys)

    def count_quarantined(self, cause: str) -> None:
        """Count a file by the first word of its cause, if that is one that we know."""
        word = cause.partition(":")[0]
        known = word if word in {"torn", "damaged", "version", "identity"} else "other"
        self._counters[f"quarantined_{known}_total"] += 1

    def clear(self, namespace: str) -> tuple[int, int]:
        """Delete a namespace's files, or with "" all; return how many records and bytes go."""
        files = [f for f in self.index if namespace in ("", f.key.folder.namespace)]
        records = sum(len(file.records) for file in files)
        for file in files:
            self.index.remove(file.key)
            self._go(file.key, file.size_bytes, "delete")
        if not namespace:
            for name in list(self._quarantined):
                self._drop_quarantined(name)
        return records, sum(f.size_bytes for f in files)

    def missing(self, key: FileKey) -> None:
        """Forget a file that somebody else has deleted."""
        self._doomed.pop(key, None)
        if self.index.remove(key) is not None:
            self._counters["missing_files_total"] += 1

    def free_name(self, folder: FolderKey, first_hash: bytes) -> FileKey:
        """Return a name for a new file that no file of the folder has, doomed ones neither."""
        for name in file_names.file_names(first_hash):
            key = FileKey(folder, name)
            if key not in self.index and key not in self._doomed:
                return key
        raise AssertionError("there is always another name")

    def is_empty(self, folder: FolderKey) -> bool:
        """Tell whether no file of ours lies in a folder."""
        return not self.index.file_count(folder) and all(k.folder != folder for k in self._doomed)

    def listed(self, now_s: float) -> list[StoredFolder]:
        """Return what each folder holds, in order of their names."""
        sums: dict[FolderKey, tuple[int, int, float]] = {}
        for file in self.index:
            records, size_bytes, used_at_s = sums.get(file.key.folder, (0, 0, float("-inf")))
            sums[file.key.folder] = (
                records + len(file.records),
                size_bytes + file.size_bytes,
                max(used_at_s, file.used_at_s),
            )
        return [
            StoredFolder(
                namespace=folder.namespace,
                rank=folder.rank,
                world_size=folder.world_size,
                records=records,
                size_bytes=size_bytes,
                used_s=max(0.0, now_s - used_at_s),
            )
            for folder, (records, size_bytes, used_at_s) in sorted(sums.items())
        ]

    def check_invariants(self) -> None:
        """Raise AssertionError when what is held contradicts itself."""
        self.index.check_invariants()
        for key in self._doomed:
            assert key in self.pins or not self._is_open, key
            assert key not in self.index, key
        assert len(self._quarantined) <= QUARANTINED_MAX

    def _released(self, keys: Iterable[FileKey]) -> None:
        for key in keys:
            if key in self._doomed and self._is_open:
                size_bytes, fate = self._doomed.pop(key)
                self._go(key, size_bytes, fate)

    def _go(self, key: FileKey, size_bytes: int, fate: Fate) -> None:
        """Let a file that is not to be located any more go, now or when it is released."""
        if key in self.pins:
            self._doomed[key] = (size_bytes, fate)
        elif fate == "delete":
            self._out.append(DeleteFile(key))
        else:
            name = file_names.quarantined_name(key)
            self._out.append(QuarantineFile(key, name))
            self._quarantined.pop(name, None)
            self._quarantined[name] = size_bytes
            for old in list(self._quarantined)[:-QUARANTINED_MAX]:
                self._drop_quarantined(old)

    def _drop_quarantined(self, name: str) -> None:
        del self._quarantined[name]
        self._out.append(DropQuarantined(name))


def _oldest_first(file: FoundFile) -> tuple[float, FileKey]:
    return (-file.age_s, file.key)
