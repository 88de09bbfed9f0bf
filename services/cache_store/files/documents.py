"""Files of documents. Owns their format: a checksum over owner, name and content, then the content.

```
offset  bytes
     0      8  magic
     8     16  xxh3_128 of the document's path and its content
    24      -  content
```
"""

import os
from pathlib import Path

import xxhash

from services.cache_store.file_names import DocumentKey

_MAGIC = b"LSDOCU1\n"
_HEADER_BYTES = 24


def write(root: Path, key: DocumentKey, data: bytes) -> None:
    """Write a document under a temporary name, then rename it.

    Args:
        root: the store's directory.
        key: the document.
        data: its content.

    Raises:
        OSError: the disk is full, read-only or broken.
    """
    folder = (root / key.path).parent
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    partial = root / key.partial_path
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(partial, flags, 0o600), "wb") as file:  # noqa: PTH123 - an open descriptor
        file.write(_header(key, data))
        file.write(data)
    partial.rename(root / key.path)


def read(root: Path, key: DocumentKey) -> bytes | None:
    """Return a document's content; None if its file is gone or its checksum does not match.

    Args:
        root: the store's directory.
        key: the document.

    Raises:
        OSError: the disk is broken.
    """
    try:
        descriptor = os.open(root / key.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:  # noqa: PTH123 - an open descriptor
        content = file.read()
    data = content[_HEADER_BYTES:]
    return data if content[:_HEADER_BYTES] == _header(key, data) else None


def _header(key: DocumentKey, data: bytes) -> bytes:
    checksum = xxhash.xxh3_128(key.path.encode())
    checksum.update(data)
    return _MAGIC + checksum.digest()
