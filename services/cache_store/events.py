"""Events that the core handles and actions that it returns. Neither crosses a process. Pure."""

import dataclasses
from typing import Any, Literal

from services.cache_store.file_names import DocumentKey, FileKey, FolderKey
from shared.identifiers import PeerId
from shared.messages import CommitBlocks, FromStore, ToStore, WrittenRecord
from shared.transport.link_events import LinkEvent

LogLevel = Literal["info", "warning", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class FoundFile:
    """A record file that the scan of the directory has found."""

    key: FileKey
    size_bytes: int
    age_s: float
    """Seconds since its last use, by its modification time."""
    records: tuple[WrittenRecord, ...]
    """In order of their offsets; empty for a file of another format version."""


@dataclasses.dataclass(frozen=True, slots=True)
class BadFile:
    """A file with the name of a record file whose bytes are not records."""

    key: FileKey
    size_bytes: int
    cause: str
    """`<word>: <sentence>`, where the word (torn, damaged, version, identity) selects a counter."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundDocument:
    """A document's file that the scan of the directory has found; its content was not read."""

    key: DocumentKey
    size_bytes: int
    age_s: float
    """Seconds since its last use, by its modification time."""


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryOpened:
    """Result of OpenDirectory: the directory is locked and writable, and was scanned."""

    files: tuple[FoundFile, ...]
    bad_files: tuple[BadFile, ...]
    quarantined: tuple[tuple[str, int], ...]
    """Name and bytes of each quarantined file, oldest first."""
    foreign_files: int
    """Number of files and folders that do not belong to the store."""
    foreign_example: str
    """Path of one foreign file; "" without foreign files."""
    bytes_max: int
    """The size limit in bytes; beyond it the store evicts."""
    took_s: float
    """Seconds that locking, checking and scanning took."""
    documents: tuple[FoundDocument, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryUnusable:
    """Result of OpenDirectory when it failed, or a later failure of the disk."""

    cause: str
    """A sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileTaken:
    """Result of TakeOverFile: a rank's record file belongs to the store now, or was refused."""

    action: "TakeOverFile"
    refusal: str
    """Why the file was not taken over; "" when it has its new name."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileMissing:
    """A record file is gone from its folder: another program has deleted it."""

    key: FileKey


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentWritten:
    """Result of WriteDocument."""

    action: "WriteDocument"
    refusal: str
    """Why it was not written; "" when it was."""


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentLoaded:
    """Result of LoadDocument."""

    action: "LoadDocument"
    data: bytes | None
    """None: its file is gone or damaged."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimePassed:
    """Periodic tick: the core checks or reopens the directory, and deletes old partial files."""


Event = (
    LinkEvent[ToStore]
    | DirectoryOpened
    | DirectoryUnusable
    | FileTaken
    | FileMissing
    | DocumentWritten
    | DocumentLoaded
    | TimePassed
)


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one peer."""

    peer: PeerId
    message: FromStore


@dataclasses.dataclass(frozen=True, slots=True)
class WriteLog:
    """Write one line into the log."""

    level: LogLevel
    event: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class OpenDirectory:
    """Create, lock and scan the directory in another thread; answered by DirectoryOpened."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeDirectory:
    """Check that the directory is still locked and writable; else DirectoryUnusable follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class MakeFolder:
    """Create a rank's folder unless it exists."""

    folder: FolderKey


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveFolder:
    """Remove a rank's folder and its namespace's folder if they are empty."""

    folder: FolderKey


@dataclasses.dataclass(frozen=True, slots=True)
class DeletePartials:
    """Delete the partial files in a folder that were not written to for `unused_s` seconds."""

    folder: FolderKey
    unused_s: float
    """Shortest time without a write; 0: delete all partial files."""


@dataclasses.dataclass(frozen=True, slots=True)
class TakeOverFile:
    """Rename a partial file to a record file if its headers match the commit; gives FileTaken."""

    peer: PeerId
    key: FileKey
    """Folder and new name."""
    commit: CommitBlocks
    """The peer's message, with the partial file's name and the records expected in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class TouchFiles:
    """Record a use of files: set their modification times to now, each later than the previous."""

    keys: tuple[FileKey, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteFile:
    """Delete a file of a rank's folder."""

    key: FileKey


@dataclasses.dataclass(frozen=True, slots=True)
class QuarantineFile:
    """Move a file from its folder into the quarantine."""

    key: FileKey
    name: str
    """Its name in the quarantine."""


@dataclasses.dataclass(frozen=True, slots=True)
class DropQuarantined:
    """Delete a file in the quarantine."""

    name: str
    """Its name in the quarantine."""


@dataclasses.dataclass(frozen=True, slots=True)
class WriteDocument:
    """Write a document's file in place of an earlier one; gives DocumentWritten."""

    peer: PeerId
    key: DocumentKey
    version: int
    """The document's own number in the core, which a later one of the same name does not have."""
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LoadDocument:
    """Read a document's file, check it and record the use of it; gives DocumentLoaded."""

    peer: PeerId
    query_id: int
    key: DocumentKey
    version: int
    """As in WriteDocument."""


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveDocument:
    """Delete a document's file, and its owner's folder if it is empty then."""

    key: DocumentKey


DocumentAction = WriteDocument | LoadDocument | RemoveDocument

DiskAction = (
    ProbeDirectory
    | MakeFolder
    | RemoveFolder
    | DeletePartials
    | TakeOverFile
    | TouchFiles
    | DeleteFile
    | QuarantineFile
    | DropQuarantined
    | DocumentAction
)

Action = Send | WriteLog | OpenDirectory | DiskAction
