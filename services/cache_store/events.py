"""Events that the core handles and actions that it returns. Neither crosses a process. Pure."""

import dataclasses
from typing import Any, Literal

from services.cache_store.file_names import FileKey, FolderKey
from shared.identifiers import PeerId
from shared.messages import CommitBlocks, FromStore, ToStore, WrittenRecord
from shared.transport.link_events import LinkEvent

LogLevel = Literal["info", "warning", "error"]


@dataclasses.dataclass(frozen=True, slots=True)
class FoundFile:
    """A record file found in the directory."""

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
    """A word for a counter, a colon, and a sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryOpened:
    """The directory is locked and writable, and was scanned."""

    files: tuple[FoundFile, ...]
    bad_files: tuple[BadFile, ...]
    quarantined: tuple[tuple[str, int], ...]
    """Name and bytes of each quarantined file, oldest first."""
    foreign_files: int
    foreign_example: str
    """Path of one foreign file; "" without foreign files."""
    bytes_max: int
    """The size limit in bytes; beyond it the store evicts."""
    took_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryUnusable:
    """The answer to OpenDirectory when it failed, or a later failure of the disk."""

    cause: str


@dataclasses.dataclass(frozen=True, slots=True)
class FileTaken:
    """The answer to TakeOverFile."""

    action: "TakeOverFile"
    refusal: str
    """Why the file was not taken over; "" when it has its new name."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileMissing:
    """A record file was deleted by another program."""

    key: FileKey


@dataclasses.dataclass(frozen=True, slots=True)
class TimePassed:
    """Check the clock."""


Event = (
    LinkEvent[ToStore] | DirectoryOpened | DirectoryUnusable | FileTaken | FileMissing | TimePassed
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
    """Check that the directory is still usable; DirectoryUnusable follows when it is not."""


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
    """Delete partial files that ranks left in a folder."""

    folder: FolderKey
    unused_s: float
    """Delete only files that were not written to for this long."""


@dataclasses.dataclass(frozen=True, slots=True)
class TakeOverFile:
    """Check the headers of a partial file, and rename it when they are as committed."""

    peer: PeerId
    key: FileKey
    """The new name."""
    commit: CommitBlocks


@dataclasses.dataclass(frozen=True, slots=True)
class TouchFiles:
    """Set modification times to now, in rising order."""

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
    """Delete a quarantined file."""

    name: str


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
)

Action = Send | WriteLog | OpenDirectory | DiskAction
