"""File and folder names in the store's directory. Pure.

```
<directory>/lockstep.lock                            the owner: process id, listening address
<directory>/quarantine/                              the latest bad files
<directory>/<namespace>/rank-<r>-of-<n>/
    partial-<anything>                               being written by the rank
    <hash of its first record>[-<number>].blocks     taken over: a sequence of records
<directory>/documents/<owner>/
    <name>.partial                                   being written by the store
    <name>.document                                  a document that a gateway keeps
```

All other files are foreign: they are counted and never changed.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from shared import limits

LOCK = "lockstep.lock"
PROBE = "lockstep.probe"
QUARANTINE = "quarantine"
PARTIAL_PREFIX = "partial-"
DOCUMENTS = "documents"
DOCUMENT_SUFFIX = ".document"
DOCUMENT_PARTIAL_SUFFIX = ".partial"

_NAMESPACE = re.compile(r"[0-9a-f]{1,64}")
_RANK_FOLDER = re.compile(r"rank-(0|[1-9][0-9]?)-of-([1-9][0-9]?)")
_DOCUMENT = re.compile(r"([0-9A-Za-z_-]{1,128})\.(document|partial)")
_FILE = re.compile(r"[0-9a-f]{64}(-[1-9][0-9]*)?\.blocks")


class FolderKey(NamedTuple):
    """Identifies the folder of one rank's blocks in one namespace."""

    namespace: str
    rank: int
    world_size: int

    @property
    def path(self) -> str:
        """Path relative to the store's directory: `<namespace>/rank-<r>-of-<n>`."""
        return f"{self.namespace}/rank-{self.rank}-of-{self.world_size}"


class FileKey(NamedTuple):
    """Identifies a file: its folder and its name there."""

    folder: FolderKey
    name: str


class DocumentKey(NamedTuple):
    """Identifies a document: whose it is and its name."""

    owner: str
    name: str

    @property
    def path(self) -> str:
        """Path relative to the store's directory: `documents/<owner>/<name>.document`."""
        return f"{DOCUMENTS}/{self.owner}/{self.name}{DOCUMENT_SUFFIX}"

    @property
    def partial_path(self) -> str:
        """Path of the file while the document is being written."""
        return f"{DOCUMENTS}/{self.owner}/{self.name}{DOCUMENT_PARTIAL_SUFFIX}"


def is_namespace(name: str) -> bool:
    """Return True when `name` has 1 to 64 hexadecimal digits, as a namespace's folder has."""
    return _NAMESPACE.fullmatch(name) is not None


def folder_key(namespace: str, name: str) -> FolderKey | None:
    """Parse the name of a folder in a namespace's folder.

    Args:
        namespace: name of the outer folder.
        name: name of the inner folder, `rank-<r>-of-<n>`.

    Returns:
        The key of the rank's folder; None when either name is foreign to the store.
    """
    found = _RANK_FOLDER.fullmatch(name)
    key = FolderKey(namespace, int(found[1]), int(found[2])) if found else None
    return key if key is not None and is_possible(key) else None


def document_key(owner: str, file_name: str) -> tuple[DocumentKey, bool] | None:
    """Parse the name of a file in an owner's folder of documents.

    Args:
        owner: name of the folder.
        file_name: name of the file.

    Returns:
        (the document's key, whether the file is complete); None when a name is foreign.
    """
    found = _DOCUMENT.fullmatch(file_name) if is_namespace(owner) else None
    return (DocumentKey(owner, found[1]), found[2] == "document") if found else None


def is_possible(key: FolderKey) -> bool:
    """Return True when the namespace is hexadecimal and 0 <= rank < world size <= RANKS_MAX."""
    return is_namespace(key.namespace) and 0 <= key.rank < key.world_size <= limits.RANKS_MAX


def is_file(name: str) -> bool:
    """Return True for the name of a record file: 64 hexadecimal digits[-number].blocks."""
    return _FILE.fullmatch(name) is not None


def is_partial(name: str) -> bool:
    """Return True for the name of a file that a rank is still writing: `partial-<anything>`."""
    return name.startswith(PARTIAL_PREFIX)


def file_names(first_hash: bytes) -> Iterator[str]:
    """Yield candidates for a record file's name, without end, because names may be taken.

    Args:
        first_hash: hash of the file's first record, 32 bytes.

    Yields:
        `<hash>.blocks`, `<hash>-1.blocks`, `<hash>-2.blocks` and further numbers.
    """
    yield f"{first_hash.hex()}.blocks"
    for number in itertools.count(1):
        yield f"{first_hash.hex()}-{number}.blocks"


def quarantined_name(key: FileKey) -> str:
    """Return a file's name in the quarantine: `<namespace>-rank-<r>-of-<n>-<its name>`."""
    return f"{key.folder.path.replace('/', '-')}-{key.name}"
