"""Taking over a file that a rank has written: inspect, make room, rename, index. Pure."""

from services.cache_store import file_names
from services.cache_store.events import (
    Action,
    DeleteFile,
    FileInspected,
    FileTaken,
    InspectFile,
    Send,
    TakeOverFile,
    WriteLog,
)
from services.cache_store.file_names import FileKey, FolderKey
from services.cache_store.records.stored_files import StoredFiles
from shared.identifiers import PeerId
from shared.messages import BlocksCommitted, CommitBlocks


class Commits:
    """What happens to a CommitBlocks; each is answered exactly once."""

    def __init__(
        self, holdings: StoredFiles, out: list[Action], counters: dict[str, float]
    ) -> None:
        self._holdings = holdings
        self._out = out
        self._counters = counters

    def begin(
        self, peer: PeerId, folder: FolderKey | None, commit: CommitBlocks, off_cause: str
    ) -> None:
        """Have the file inspected, unless the order itself is wrong or the store is off."""
        if off_cause:
            # The directory may be gone or replaced: nothing is deleted in it now.
            self._answer(peer, commit, f"The store is off: {off_cause}")
        elif folder is None:
            self._answer(peer, commit, "No namespace is open.")
        elif not file_names.is_partial(commit.name):
            trouble = f"The file's name does not begin with {file_names.PARTIAL_PREFIX}"
            self._answer(peer, commit, f"{trouble}.")
        else:
            self._out.append(InspectFile(peer, folder, commit))

    def inspected(self, event: FileInspected, off_cause: str) -> None:
        """Take the file over if its headers say what the rank says and there is room for it."""
        order = event.order
        commit = order.commit
        trouble = event.trouble
        if off_cause:
            self._answer(order.peer, commit, f"The store is off: {off_cause}")
            return
        if not trouble and list(event.records) != commit.records:
            trouble = "The file holds other records than those that were named."
        if not trouble:
            preferred = self._holdings.evictable(order.folder, commit.evict_first)
            if self._holdings.make_room(event.size_bytes, preferred):
                key = self._holdings.free_name(order.folder, commit.records[0].hash)
                self._out.append(TakeOverFile(order.peer, key, event.size_bytes, commit))
                return
            trouble = (
                f"There is no room for {event.size_bytes} bytes: "
                f"the limit is {self._holdings.bytes_max}, and what is being read stays."
            )
        self._refuse(order.peer, order.folder, commit, trouble)

    def taken(self, event: FileTaken, now_s: float, off_cause: str) -> None:
        """Index the file, so that its records can be located from now on."""
        order = event.order
        if off_cause:
            self._answer(order.peer, order.commit, f"The store is off: {off_cause}")
            return
        if event.trouble:
            self._refuse(order.peer, order.key.folder, order.commit, event.trouble)
            return
        self._holdings.add(order.key, order.size_bytes, order.commit.records, now_s)
        self._counters["committed_files_total"] += 1
        self._counters["committed_records_total"] += len(order.commit.records)
        self._counters["committed_bytes_total"] += order.size_bytes
        self._answer(order.peer, order.commit, "")

    def _refuse(self, peer: PeerId, folder: FolderKey, commit: CommitBlocks, trouble: str) -> None:
        self._out.append(DeleteFile(FileKey(folder, commit.name)))
        fields = {"file": f"{folder.path}/{commit.name}", "cause": trouble}
        self._out.append(WriteLog("warning", "commit_refused", fields))
        self._answer(peer, commit, trouble)

    def _answer(self, peer: PeerId, commit: CommitBlocks, trouble: str) -> None:
        if trouble:
            self._counters["commits_refused_total"] += 1
        answer = BlocksCommitted(
            name=commit.name,
            accepted=not trouble,
            detail=trouble,
            store_bytes=self._holdings.bytes_used,
        )
        self._out.append(Send(peer, answer))
