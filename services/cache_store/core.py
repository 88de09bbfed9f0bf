"""The cache store's core. Owns all decisions; does no I/O and reads no clock.

`handle(event, now_s)` takes one event and returns the actions to perform, in order. Nothing else
changes the state. The shell in `main` performs the actions; the disk's results come back as events.
"""

from collections import defaultdict

from services.cache_store import events, file_names
from services.cache_store.events import Action, Send
from services.cache_store.file_names import FolderKey
from services.cache_store.records.commits import Commits
from services.cache_store.records.documents import DocumentLimits, Documents
from services.cache_store.records.sessions import Sessions
from services.cache_store.records.stored_files import StoredFiles
from services.cache_store.switch import Phase, Switch
from shared import messages
from shared.identifiers import PeerId
from shared.transport.link_events import Connected, Lost, Received

FOLDERS_PER_PAGE = 1_024
_CAUSE_CHARS_MAX = 4_000
"""Leaves room for a few words before a cause within a message's text."""


class StoreCore:
    """Decides what the cache store does, without I/O: turns events into actions for the shell."""

    def __init__(
        self,
        directory: str,
        ttl_s: float = 0.0,
        document_limits: DocumentLimits = DocumentLimits(),  # noqa: B008 - it never changes
    ) -> None:
        """Start switched off. The first TimePassed causes the scan of the directory.

        Args:
            directory: its absolute path, for messages and log lines.
            ttl_s: seconds after their last use at which records are deleted; 0: never.
            document_limits: the bounds of documents; without them all that is there stays.
        """
        self._directory = directory
        self._ttl_s = ttl_s
        self._actions: list[Action] = []
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._switch = Switch()
        self._sessions = Sessions(self._actions)
        self._files = StoredFiles(self._actions, self._counters)
        self._commits = Commits(self._files, self._actions, self._counters)
        self._documents = Documents(self._actions, self._counters, document_limits)
        self._foreign_files = 0
        self._opened_in_s = 0.0

    def handle(self, event: events.Event, now_s: float) -> list[Action]:
        """Update the state for one event, and return the actions that it causes.

        Args:
            event: a peer's message, the begin or end of a session, a result of the disk, or a tick.
            now_s: the time in monotonic seconds.

        Returns:
            The actions to perform, in order.
        """
        match event:
            case Received():
                self._handle_message(event.peer, event.message, now_s)
            case events.TimePassed():
                self._check_clock(now_s)
            case events.FileTaken():
                self._commits.finish(event, now_s, self._switch.cause)
            case events.FileMissing():
                self._files.forget_missing(event.key)
            case events.DocumentWritten():
                self._documents.finish_write(event, self._switch.cause)
            case events.DocumentLoaded():
                self._documents.finish_read(event)
            case Connected():
                self._sessions.begin(event.peer)
            case Lost():
                self._lost(event.peer, now_s)
            case events.DirectoryOpened():
                self._turn_on(event, now_s)
            case events.DirectoryUnusable():
                self._turn_off(event.cause, now_s)
        self._remove_empty_folders()
        actions = list(self._actions)
        self._actions.clear()
        return actions

    @property
    def is_on(self) -> bool:
        """Whether the directory is usable, so that ranks can store blocks and find stored ones."""
        return self._switch.phase is Phase.ON

    def check_invariants(self) -> None:
        """Raise AssertionError if phase and cause disagree, or files are indexed while off."""
        assert self.is_on == (self._switch.cause == "")
        self._files.check_invariants()
        self._documents.check_invariants()
        assert self.is_on or not len(self._files.index)
        assert self.is_on or not len(self._documents)

    # --- on and off --------------------------------------------------------------------------

    def _check_clock(self, now_s: float) -> None:
        if self._switch.is_due(now_s):
            self._actions.append(self._switch.start_check(now_s))
        self._sessions.sweep(now_s, is_on=self.is_on)
        self._documents.expire(now_s)
        if self._ttl_s and self.is_on:
            expired = self._files.expire(now_s - self._ttl_s)
            if expired:
                self._log("info", "records_expired", files=expired, ttl_s=self._ttl_s)

    def _turn_on(self, opened: events.DirectoryOpened, now_s: float) -> None:
        self._switch.turn_on(now_s)
        self._opened_in_s = opened.took_s
        self._files.load(opened, now_s)
        self._documents.load(opened.documents, now_s)
        self._log_opened(opened)
        for _, folder in self._sessions.with_folders():
            self._actions.append(events.MakeFolder(folder))
        self._tell_all()

    def _turn_off(self, cause: str, now_s: float) -> None:
        if self._switch.phase is Phase.OFF:
            # Actions from before the failure fail too.
            return
        cause = cause[:_CAUSE_CHARS_MAX]
        was_on, known_cause = self.is_on, self._switch.cause
        self._switch.turn_off(cause, now_s)
        self._files.unload()
        self._documents.unload()
        if was_on or known_cause != cause:
            self._log("error", "store_off", cause=cause, directory=self._directory)
        if was_on:
            self._counters["switched_off_total"] += 1
            self._tell_all()

    def _tell_all(self) -> None:
        """Send each peer the path of its folder ("" while off), then all of them a report."""
        for peer, folder in self._sessions.with_folders():
            self._send(peer, self._namespace_opened(folder))
        report = self._report()
        self._actions.extend(Send(peer, report) for peer in self._sessions)

    def _log_opened(self, opened: events.DirectoryOpened) -> None:
        self._log(
            "info",
            "store_on",
            directory=self._directory,
            records=self._files.index.record_count,
            bytes_used=self._files.bytes_used,
            bytes_max=opened.bytes_max,
            seconds=round(opened.took_s, 3),
        )
        if opened.bad_files:
            first = opened.bad_files[0]
            place = f"{first.key.folder.path}/{first.key.name}"
            count = len(opened.bad_files)
            self._log("warning", "files_quarantined", files=count, first=place, cause=first.cause)
        if opened.foreign_files and opened.foreign_files != self._foreign_files:
            self._log(
                "warning",
                "foreign_files_left_alone",
                files=opened.foreign_files,
                first=opened.foreign_example,
            )
        self._foreign_files = opened.foreign_files

    # --- peers -------------------------------------------------------------------------------

    def _handle_message(self, peer: PeerId, message: messages.ToStore, now_s: float) -> None:
        match message:
            case messages.LocateBlocks():
                self._locate(peer, message, now_s)
            case messages.ReleaseBlocks():
                self._files.release(peer, message.query_id)
            case messages.CommitBlocks():
                folder = self._sessions.folder_of(peer)
                self._commits.begin(peer, folder, message, self._switch.cause)
            case messages.OpenNamespace():
                self._open_namespace(peer, message, now_s)
            case messages.QuarantineBlocks():
                self._quarantine(peer, message)
            case messages.SpillFailed():
                self._counters["spills_failed_total"] += 1
                if self.is_on:
                    self._turn_off(f"A rank could not write: {message.detail}", now_s)
            case messages.KeepDocument():
                self._documents.keep(peer, message, now_s, self._switch.cause)
            case messages.ReadDocument():
                self._documents.read(peer, message, now_s)
            case messages.DeleteDocument():
                self._documents.delete(peer, message)
            case messages.QueryStore():
                self._send(peer, self._report())
            case messages.ListBlocks():
                folders = self._files.list_folders(now_s)[message.page * FOLDERS_PER_PAGE :]
                page, more = folders[:FOLDERS_PER_PAGE], len(folders) > FOLDERS_PER_PAGE
                self._send(peer, messages.BlocksListed(folders=page, more=more))
            case messages.ClearBlocks():
                records, size_bytes = self._files.clear(message.namespace)
                self._log("info", "cleared", records=records, bytes=size_bytes)
                self._send(peer, messages.BlocksCleared(records=records, size_bytes=size_bytes))

    def _lost(self, peer: PeerId, now_s: float) -> None:
        self._files.release_all(peer)
        self._sessions.leave(peer, now_s, is_on=self.is_on)
        self._sessions.end(peer)

    def _open_namespace(self, peer: PeerId, message: messages.OpenNamespace, now_s: float) -> None:
        folder = FolderKey(message.namespace, message.rank, message.world_size)
        if self._sessions.folder_of(peer) not in (None, folder):
            self._sessions.leave(peer, now_s, is_on=self.is_on)
        if not file_names.is_possible(folder):
            self._log("warning", "namespace_refused", folder=folder.path)
            self._send(peer, messages.NamespaceOpened(namespace=message.namespace, folder=""))
            return
        self._sessions.open(peer, folder, is_on=self.is_on)
        self._send(peer, self._namespace_opened(folder))
        if self.is_on:
            index = self._files.index
            records = index.records_in(folder)
            self._log(
                "info",
                "namespace_opened",
                folder=folder.path,
                records=records,
                other_records=index.record_count - records,
            )

    def _locate(self, peer: PeerId, message: messages.LocateBlocks, now_s: float) -> None:
        folder = self._sessions.folder_of(peer)
        places: list[messages.BlockPlace | None] = [None] * len(message.hashes)
        if folder is not None and self.is_on:
            places = self._files.locate(peer, message.query_id, folder, message.hashes, now_s)
        found = sum(place is not None for place in places)
        self._counters["located_records_total"] += found
        self._counters["absent_records_total"] += len(places) - found
        self._send(peer, messages.BlocksLocated(query_id=message.query_id, places=places))

    def _quarantine(self, peer: PeerId, message: messages.QuarantineBlocks) -> None:
        folder = self._sessions.folder_of(peer)
        if folder is None:
            return
        files = self._files.quarantine(folder, message.hashes, message.cause)
        if files:
            self._log(
                "warning",
                "records_quarantined",
                folder=folder.path,
                records=len(message.hashes),
                files=files,
                cause=message.cause,
            )

    # --- messages and log ---------------------------------------------------------------------

    def _namespace_opened(self, folder: FolderKey) -> messages.NamespaceOpened:
        path = f"{self._directory}/{folder.path}" if self.is_on else ""
        return messages.NamespaceOpened(namespace=folder.namespace, folder=path)

    def _report(self) -> messages.StoreReported:
        index = self._files.index
        return messages.StoreReported(
            on=self.is_on,
            cause=self._switch.cause,
            directory=self._directory,
            bytes_used=self._files.bytes_used,
            bytes_max=self._files.bytes_max,
            ttl_s=self._ttl_s,
            records=index.record_count,
            namespaces=len({folder.namespace for folder in index.folders()}),
            documents=len(self._documents),
            documents_bytes=self._documents.size_bytes,
            documents_bytes_max=self._documents.limits.bytes_max,
            foreign_files=self._foreign_files,
            started_s=self._opened_in_s,
            counters=dict(self._counters),
        )

    def _send(self, peer: PeerId, message: messages.FromStore) -> None:
        self._actions.append(Send(peer, message))

    def _log(self, level: events.LogLevel, event: str, **fields: object) -> None:
        self._actions.append(events.WriteLog(level, event, fields))

    def _remove_empty_folders(self) -> None:
        """Remove the folders that lose their last file and that no peer has open."""
        changed: set[FolderKey] = set()
        for action in self._actions:
            match action:
                case events.DeleteFile() | events.QuarantineFile():
                    changed.add(action.key.folder)
                case events.DeletePartials():
                    changed.add(action.folder)
        for folder in sorted(changed):
            if not self._sessions.is_open(folder) and self._files.is_empty(folder):
                self._actions.append(events.RemoveFolder(folder))
