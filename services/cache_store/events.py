"""What the core is told and what it orders. Neither crosses a process; messages do. Pure."""

import dataclasses
from typing import Any, Literal

from services.cache_store.file_names import FileKey, FolderKey
from shared.identifiers import PeerId
from shared.messages import CommitBlocks, FromStore, ToStore, WrittenRecord
from shared.transport.link_events import LinkEvent

LogLevel = Literal["info", "warning", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of ours as it lies on the disk."""

    key: FileKey
    size_bytes: int
    age_s: float
    """Seconds since it was used last, as its modification time says."""
    records: tuple[WrittenRecord, ...]
    """In order of their offsets. Empty: of another format version, not to be located."""


@dataclasses.dataclass(frozen=True, slots=True)
class BadFile:
    """A file with a name of ours that does not hold what it should."""

    key: FileKey
    size_bytes: int
    cause: str
    """One word, then a sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryOpened:
    """The directory is ours and can be written; this is what lies in it."""

    files: tuple[FoundFile, ...]
    bad_files: tuple[BadFile, ...]
    quarantined: tuple[tuple[str, int], ...]
    """Name and bytes of each file in the quarantine, oldest first."""
    foreign_files: int
    foreign_example: str
    """Path of one of them; "" when there is none."""
    bytes_max: int
    """Past it the store evicts."""
    took_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryUnusable:
    """Answer to OpenDirectory, or something failed in a directory that could be used until now."""

    cause: str


@dataclasses.dataclass(frozen=True, slots=True)
class FileInspected:
    """Answer to InspectFile."""

    order: "InspectFile"
    size_bytes: int
    records: tuple[WrittenRecord, ...]
    """What its headers say; empty when there is trouble."""
    trouble: str
    """Why it cannot be taken over; "" when it can."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileTaken:
    """Answer to TakeOverFile."""

    order: "TakeOverFile"
    trouble: str
    """"" when it has its new name."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileMissing:
    """A file that should be there is gone: somebody else has deleted it."""

    key: FileKey


@dataclasses.dataclass(frozen=True, slots=True)
class TimePassed:
    """Look at the clock."""


Event = (
    LinkEvent[ToStore]
    | DirectoryOpened
    | DirectoryUnusable
    | FileInspected
    | FileTaken
    | FileMissing
    | TimePassed
)


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one peer."""

    peer: PeerId
    message: FromStore


@dataclasses.dataclass(frozen=True, slots=True)
class WriteLog:
    """Write a log line."""

    level: LogLevel
    event: str
    fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class OpenDirectory:
    """Make, own and read the directory, beside everything else; then say DirectoryOpened."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeDirectory:
    """Look whether the directory can still be used; say DirectoryUnusable when it cannot."""


@dataclasses.dataclass(frozen=True, slots=True)
class MakeFolder:
    """Make the folder of a rank's blocks, unless it is there."""

    folder: FolderKey


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveFolder:
    """Remove a rank's folder and its namespace's, as far as they are empty."""

    folder: FolderKey


@dataclasses.dataclass(frozen=True, slots=True)
class DeletePartials:
    """Delete what ranks left half-written in a folder."""

    folder: FolderKey
    unused_s: float
    """Only what has not been written to for so long."""


@dataclasses.dataclass(frozen=True, slots=True)
class InspectFile:
    """Read the headers of a file that a rank has written."""

    peer: PeerId
    folder: FolderKey
    commit: CommitBlocks


@dataclasses.dataclass(frozen=True, slots=True)
class TakeOverFile:
    """Give a rank's file the name under which it is found again."""

    peer: PeerId
    key: FileKey
    size_bytes: int
    commit: CommitBlocks


@dataclasses.dataclass(frozen=True, slots=True)
class TouchFiles:
    """Set the modification times to now, each later than the one before it."""

    keys: tuple[FileKey, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteFile:
    """Delete a file in a rank's folder."""

    key: FileKey


@dataclasses.dataclass(frozen=True, slots=True)
class QuarantineFile:
    """Move a file out of its folder into the quarantine."""

    key: FileKey
    name: str
    """What it is called there."""


@dataclasses.dataclass(frozen=True, slots=True)
class DropQuarantined:
    """Delete a file in the quarantine."""

    name: str


DiskAction = (
    ProbeDirectory
    | MakeFolder
    | RemoveFolder
    | DeletePartials
    | InspectFile
    | TakeOverFile
    | TouchFiles
    | DeleteFile
    | QuarantineFile
    | DropQuarantined
)

Action = Send | WriteLog | OpenDirectory | DiskAction
