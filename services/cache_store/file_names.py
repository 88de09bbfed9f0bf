"""What is called how in the store's directory. Pure.

```
<directory>/lockstep.lock                            who owns the directory: process, bus address
<directory>/quarantine/                              the latest files that were not what they said
<directory>/<namespace>/rank-<r>-of-<n>/
    partial-<anything>                               being written by the rank
    <hash of its first record>[-<number>].blocks     taken over: records, one behind the other
```

Everything else is foreign: it is counted and left alone.
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
    """Whose blocks lie in a folder: one rank's in one namespace."""

    namespace: str
    rank: int
    world_size: int

    @property
    def path(self) -> str:
        """Where it is, relative to the directory."""
        return f"{self.namespace}/rank-{self.rank}-of-{self.world_size}"


class FileKey(NamedTuple):
    """One file with records."""

    folder: FolderKey
    name: str


def is_namespace(name: str) -> bool:
    """Tell whether a folder with this name in the directory can be a namespace's."""
    return _NAMESPACE.fullmatch(name) is not None


def folder_key(namespace: str, name: str) -> FolderKey | None:
    """Return what the folder `name` within a namespace's folder holds; None: it is foreign."""
    found = _RANK_FOLDER.fullmatch(name)
    if found is None or not is_namespace(namespace):
        return None
    key = FolderKey(namespace, int(found[1]), int(found[2]))
    return key if is_possible(key) else None


def is_possible(key: FolderKey) -> bool:
    """Tell whether there can be such a rank, and a folder for it."""
    return is_namespace(key.namespace) and 0 <= key.rank < key.world_size <= limits.RANKS_MAX


def is_file(name: str) -> bool:
    """Tell whether a rank's folder can hold a file of ours with this name."""
    return _FILE.fullmatch(name) is not None


def is_partial(name: str) -> bool:
    """Tell whether the file is one that a rank may be writing."""
    return name.startswith(PARTIAL_PREFIX)


def file_names(first_hash: bytes) -> Iterator[str]:
    """Give names for a file that begins with the record `first_hash`, without end."""
    yield f"{first_hash.hex()}.blocks"
    for number in itertools.count(1):
        yield f"{first_hash.hex()}-{number}.blocks"


def quarantined_name(key: FileKey) -> str:
    """Return what a file is called in the quarantine: where it came from, in one name."""
    folder, name = key
    return f"{folder.namespace}-rank-{folder.rank}-of-{folder.world_size}-{name}"
