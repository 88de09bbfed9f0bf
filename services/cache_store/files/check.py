"""Reading every record of a directory and checking every byte; nothing is changed."""

import dataclasses
import os
from io import FileIO
from pathlib import Path

from services.cache_store.file_names import FileKey
from services.cache_store.files import scan
from shared import block_record
from shared.block_record import HEADER_BYTES, RecordUnreadable


@dataclasses.dataclass(frozen=True, slots=True)
class BadRecord:
    """A place where no usable record stands."""

    file: str
    """Relative to the directory."""
    offset: int
    cause: str
    """One word: what a counter would call it."""
    detail: str


@dataclasses.dataclass(slots=True)
class CheckReport:
    """What came of it."""

    records: int = 0
    """Records that are what they say."""
    size_bytes: int = 0
    """Of them."""
    bad: list[BadRecord] = dataclasses.field(default_factory=list)


def check_directory(directory: Path, namespace: str = "") -> CheckReport:
    """Check all records, or those of one namespace. Files that vanish meanwhile do not count.

    Raises:
        OSError: the directory cannot be read.
    """
    verified = CheckReport()
    files = sorted(scan.files(str(directory), scan.ScanResult()))
    for key, path in files:
        if namespace in ("", key.folder.namespace):
            _verify_file(key, path, verified)
    return verified


def _verify_file(key: FileKey, path: str, verified: CheckReport) -> None:
    offset = 0
    try:
        # A link would lead out of the folder.
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))
    except FileNotFoundError:
        # Evicted since it was listed.
        return
    with file:
        size_bytes = os.fstat(file.fileno()).st_size
        try:
            while offset < size_bytes or not size_bytes:
                record_bytes = _verify_record(file, key, size_bytes - offset)
                offset += record_bytes
                verified.records += 1
                verified.size_bytes += record_bytes
        except (RecordUnreadable, OSError) as error:
            # Nothing tells where the next one would begin.
            cause = error.cause if isinstance(error, RecordUnreadable) else "damaged"
            name = f"{key.folder.path}/{key.name}"
            verified.bad.append(BadRecord(name, offset, cause, str(error)))


def _verify_record(file: FileIO, key: FileKey, left_bytes: int) -> int:
    """Check the record where the file stands; return its length."""
    header = file.read(HEADER_BYTES)
    identity, payload_bytes = block_record.read_header(header)
    record_bytes = HEADER_BYTES + payload_bytes
    if record_bytes > left_bytes:
        raise RecordUnreadable("The file ends before the record does.", "torn")
    record = bytearray(record_bytes)
    record[:HEADER_BYTES] = header
    view = memoryview(record)
    done = HEADER_BYTES
    while done < record_bytes:
        count = file.readinto(view[done:])
        if not count:
            raise RecordUnreadable("The file ends before the record does.", "torn")
        done += count
    block_record.check_record(view, identity)
    if (identity.namespace, identity.rank, identity.world_size) != key.folder:
        raise RecordUnreadable("The record is another folder's.", "identity")
    return record_bytes
