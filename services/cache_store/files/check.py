"""The check of all stored records. Reads every byte of them; changes nothing."""

import dataclasses
import os
from pathlib import Path
from typing import BinaryIO

from services.cache_store.file_names import FileKey
from services.cache_store.files import scan
from shared import block_record
from shared.block_record import HEADER_BYTES, RecordUnreadable


@dataclasses.dataclass(frozen=True, slots=True)
class BadRecord:
    """A place in a file without a usable record."""

    file: str
    """Path relative to the directory."""
    offset: int
    """Position of the record in the file, in bytes."""
    cause: str
    """One word: torn, damaged, version or identity."""
    detail: str
    """A sentence."""


@dataclasses.dataclass(slots=True)
class CheckReport:
    """The intact and the bad records that `check_directory` has found."""

    records: int = 0
    """Number of intact records."""
    size_bytes: int = 0
    """Bytes of the intact records."""
    bad: list[BadRecord] = dataclasses.field(default_factory=list)


def check_directory(directory: Path, namespace: str = "") -> CheckReport:
    """Read all records and compare them with their checksums and with the folder they lie in.

    After a bad record the rest of its file is not read, because the next record's position is
    unknown. Files that are evicted meanwhile are skipped.

    Args:
        directory: the store's directory.
        namespace: check only the records of this namespace; "": of all.

    Returns:
        Number and bytes of the intact records, and the bad ones.

    Raises:
        OSError: the directory cannot be read.
    """
    report = CheckReport()
    files = sorted(scan.files(str(directory), scan.ScanResult()))
    for key, path in files:
        if namespace in ("", key.folder.namespace):
            _check_file(key, path, report)
    return report


def _check_file(key: FileKey, path: str, report: CheckReport) -> None:
    offset = 0
    try:
        # A symbolic link would lead out of the folder.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Evicted since the directory was scanned.
        return
    with os.fdopen(descriptor, "rb") as file:
        size_bytes = os.fstat(descriptor).st_size
        try:
            while offset < size_bytes or not size_bytes:
                record_bytes = _check_record(file, key, size_bytes - offset)
                offset += record_bytes
                report.records += 1
                report.size_bytes += record_bytes
        except (RecordUnreadable, OSError) as error:
            # The position of the next record is unknown.
            cause = error.cause if isinstance(error, RecordUnreadable) else "damaged"
            name = f"{key.folder.path}/{key.name}"
            report.bad.append(BadRecord(name, offset, cause, str(error)))


def _check_record(file: BinaryIO, key: FileKey, left_bytes: int) -> int:
    """Check the record at the file's position; return its length in bytes.

    Raises:
        RecordUnreadable: it is not an intact record of this folder.
    """
    header = file.read(HEADER_BYTES)
    identity, payload_bytes = block_record.read_header(header)
    # A damaged header may announce more bytes than fit into memory.
    record = header + file.read(min(payload_bytes, left_bytes))
    record_bytes = HEADER_BYTES + payload_bytes
    if len(record) < record_bytes:
        raise RecordUnreadable("The file ends before the record does.", "torn")
    block_record.check_record(record, identity)
    if (identity.namespace, identity.rank, identity.world_size) != key.folder:
        raise RecordUnreadable("The record belongs to another folder.", "identity")
    return record_bytes
