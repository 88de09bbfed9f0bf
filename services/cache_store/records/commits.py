"""Commits: files that ranks have written are taken over. Owns no file; answers each commit once.

A file is checked and renamed in one action. Its size is known from the commit, so a file for which
there cannot be room is refused beforehand. Old files are evicted right after the rename: a refused
file evicts nothing, and the rename itself uses no more of the disk.
"""

from services.cache_store import events, file_names
from services.cache_store.file_names import FileKey, FolderKey
from services.cache_store.records.stored_files import StoredFiles
from shared.identifiers import PeerId
from shared.messages import BlocksCommitted, CommitBlocks


class Commits:
    """Decides for each CommitBlocks whether the store takes its file over, and answers the rank."""

    def __init__(
        self, files: StoredFiles, actions: list[events.Action], counters: dict[str, float]
    ) -> None:
        """Start without commits; `actions` and `counters` are the core's and are added to."""
        self._files = files
        self._actions = actions
        self._counters = counters

    def begin(
        self, peer: PeerId, folder: FolderKey | None, commit: CommitBlocks, off_cause: str
    ) -> None:
        """Have a new file checked and renamed (`finish` gets the result), or refuse the commit.

        A commit is refused when the store is off, the rank has opened no folder, the file's name is
        not that of a partial file, or there cannot be room for it.

        Args:
            peer: the rank that has written the file.
            folder: the folder that it has opened; None: it has opened none.
            commit: its message, which names the file and the records in it.
            off_cause: why the store is off; "" when it is on.
        """
        if off_cause:
            # The directory may be gone or replaced, so nothing is deleted in it.
            self._answer(peer, commit, f"The store is off: {off_cause}")
        elif folder is None:
            self._answer(peer, commit, "No namespace is open.")
        elif not file_names.is_partial(commit.name):
            self._answer(
                peer, commit, f"The file's name must begin with {file_names.PARTIAL_PREFIX}."
            )
        elif not self._files.can_make_room(_file_bytes(commit)):
            self._refuse(peer, FileKey(folder, commit.name), commit, self._no_room(commit))
        else:
            key = self._files.free_name(folder, commit.records[0].hash)
            self._actions.append(events.TakeOverFile(peer, key, commit))

    def finish(self, event: events.FileTaken, now_s: float, off_cause: str) -> None:
        """Index a renamed file, so that its records can be located, and answer the rank.

        A file that was not renamed, or finds no room, is deleted and its commit refused. If the
        store is off meanwhile, the commit is refused and no file is touched.

        Args:
            event: the result of TakeOverFile.
            now_s: the time in monotonic seconds.
            off_cause: why the store is off; "" when it is on.
        """
        peer, key, commit = event.action.peer, event.action.key, event.action.commit
        if off_cause:
            self._answer(peer, commit, f"The store is off: {off_cause}")
            return
        if event.refusal:
            self._refuse(peer, FileKey(key.folder, commit.name), commit, event.refusal)
            return
        size_bytes = _file_bytes(commit)
        if not self._files.make_room(
            size_bytes, self._files.evictable(key.folder, commit.evict_first)
        ):
            self._refuse(peer, key, commit, self._no_room(commit))
            return
        self._files.add(key, size_bytes, commit.records, now_s)
        self._counters["committed_files_total"] += 1
        self._counters["committed_records_total"] += len(commit.records)
        self._counters["committed_bytes_total"] += size_bytes
        self._answer(peer, commit, "")

    def _no_room(self, commit: CommitBlocks) -> str:
        return (
            f"There is no room for {_file_bytes(commit)} bytes: the limit is "
            f"{self._files.bytes_max} bytes, and files being read cannot be evicted."
        )

    def _refuse(self, peer: PeerId, file: FileKey, commit: CommitBlocks, refusal: str) -> None:
        self._actions.append(events.DeleteFile(file))
        fields = {"file": f"{file.folder.path}/{commit.name}", "cause": refusal}
        self._actions.append(events.WriteLog("warning", "commit_refused", fields))
        self._answer(peer, commit, refusal)

    def _answer(self, peer: PeerId, commit: CommitBlocks, refusal: str) -> None:
        if refusal:
            self._counters["commits_refused_total"] += 1
        answer = BlocksCommitted(
            name=commit.name,
            accepted=not refusal,
            detail=refusal,
            store_bytes=self._files.bytes_used,
        )
        self._actions.append(events.Send(peer, answer))


def _file_bytes(commit: CommitBlocks) -> int:
    """Return the size of a file that consists of these records."""
    last = commit.records[-1]
    return last.offset + last.size_bytes
