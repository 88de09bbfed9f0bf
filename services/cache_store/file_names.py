"""File and folder names in the store's directory. Pure.

```
<directory>/lockstep.lock                            the owner: process id, listening address
<directory>/quarantine/                              the latest bad files
<directory>/<namespace>/rank-<r>-of-<n>/
    partial-<anything>                               being written by the rank
    <hash of its first record>[-<number>].blocks     taken over: a sequence of records
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

_NAMESPACE = re.compile(r"[0-9a-f]{1,64}")
_RANK_FOLDER = re.compile(r"rank-(0|[1-9][0-9]?)-of-([1-9][0-9]?)")
_FILE = re.compile(r"[0-9a-f]{64}(-[1-9][0-9]*)?\.blocks")


class FolderKey(NamedTuple):
    """The folder of one rank's blocks in one namespace."""

    namespace: str
    rank: int
    world_size: int

    @property
    def path(self) -> str:
        """Its path relative to the directory."""
        return f"{self.namespace}/rank-{self.rank}-of-{self.world_size}"


class FileKey(NamedTuple):
    """A record file."""

    folder: FolderKey
    name: str


def is_namespace(name: str) -> bool:
    """Return True when a folder with this name can be a namespace."""
    return _NAMESPACE.fullmatch(name) is not None


def folder_key(namespace: str, name: str) -> FolderKey | None:
    """Return the rank folder `name` of a namespace; None when it is foreign."""
    found = _RANK_FOLDER.fullmatch(name)
    if found is None or not is_namespace(namespace):
        return None
    key = FolderKey(namespace, int(found[1]), int(found[2]))
    return key if is_possible(key) else None


def is_possible(key: FolderKey) -> bool:
    """Return True when the namespace and the rank are valid."""
    return is_namespace(key.namespace) and 0 <= key.rank < key.world_size <= limits.RANKS_MAX


def is_file(name: str) -> bool:
    """Return True when this is the name of a record file."""
    return _FILE.fullmatch(name) is not None


def is_partial(name: str) -> bool:
    """Return True when this is the name of a partial file."""
    return name.startswith(PARTIAL_PREFIX)


def file_names(first_hash: bytes) -> Iterator[str]:
    """Yield names for a file whose first record is `first_hash`, without end."""
    yield f"{first_hash.hex()}.blocks"
    for number in itertools.count(1):
        yield f"{first_hash.hex()}-{number}.blocks"


def quarantined_name(key: FileKey) -> str:
    """Return a file's name in the quarantine, which includes its folder."""
    folder, name = key
    return f"{folder.namespace}-rank-{folder.rank}-of-{folder.world_size}-{name}"
