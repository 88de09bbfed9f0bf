"""Binary format of a stored block: identity, payload and checksums. Owns encoding and checking.

```
offset  bytes
     0      8  magic
     8      2  format version
    10      2  rank
    12      2  world size
    14      1  kind: 0 block, 1 checkpoint
    15      1  zero
    16      4  tokens
    20      4  zero
    24      8  payload length in bytes
    32     32  hash
    64     64  namespace in hexadecimal digits, padded with zeros
   128    104  zero
   232     16  xxh3_128 of bytes 0 to 231 and the payload
   248      8  xxh3_64 of bytes 0 to 247
   256      -  payload
```

Numbers are little-endian. Records follow each other in a file without gaps. The header's own
checksum allows an index to be rebuilt without reading payloads. The other checksum binds the
payload to the identity, so that an intact payload of another block is rejected. xxh3 detects
accidents, not forgeries; the folder's mode keeps other users out.
"""

import dataclasses
import re
import struct
from typing import Final, Literal

import xxhash

from shared import limits
from shared.errors import LockstepError

HEADER_BYTES: Final = 256
"""Length of the header, and so the offset of the payload in a record."""

_MAGIC = b"LSBLOCK\n"
_FIELDS = struct.Struct("<8sHHHBxI4xQ32s64s")
_SEALED_BYTES = 232
_SEAL_BYTES = 16
_HEADER_SEAL_BYTES = 8
_NAMESPACE = re.compile(rb"[0-9a-f]*\x00*")
_KINDS: tuple[Literal["block", "checkpoint"], ...] = ("block", "checkpoint")

Cause = Literal["torn", "damaged", "version", "identity"]


class RecordUnreadable(LockstepError):
    """Raised for bytes that are not the expected record. Callers treat it as a cache miss.

    `cause` is for counters: `torn` (cut off or padded), `damaged` (changed), `version` (another
    format version) or `identity` (a record of another block).
    """

    def __init__(self, sentence: str, cause: Cause) -> None:
        super().__init__(sentence)
        self.cause: Cause = cause


@dataclasses.dataclass(frozen=True, slots=True)
class RecordIdentity:
    """Facts that identify the block or checkpoint in a record. A reader compares all of them."""

    namespace: str
    """0 to 64 lower-case hexadecimal digits."""
    rank: int
    world_size: int
    hash: bytes
    """32 bytes."""
    kind: Literal["block", "checkpoint"]
    tokens: int
    """Tokens in a block; for a checkpoint, the tokens before it."""


def build_header(identity: RecordIdentity, payload: memoryview | bytes) -> bytes:
    """Return the header for a record with this payload.

    Args:
        identity: the record's identity.
        payload: contiguous bytes of any item type. Read once, not copied.
    """
    namespace_digits = identity.namespace.encode("ascii")
    assert len(identity.hash) == 32
    assert len(namespace_digits) <= 64
    assert _NAMESPACE.fullmatch(namespace_digits)
    sealed = _FIELDS.pack(
        _MAGIC,
        limits.RECORD_FORMAT_VERSION,
        identity.rank,
        identity.world_size,
        _KINDS.index(identity.kind),
        identity.tokens,
        memoryview(payload).nbytes,
        identity.hash,
        namespace_digits,
    ).ljust(_SEALED_BYTES, b"\0")
    seal = xxhash.xxh3_128(sealed)
    seal.update(payload)
    body = sealed + seal.digest()
    return body + xxhash.xxh3_64_digest(body)


def read_header(data: bytes | bytearray | memoryview) -> tuple[RecordIdentity, int]:
    """Return the identity and the payload's length in bytes from the header at the start of `data`.

    Compares the header with its own checksum; `check_record` also checks the payload.

    Raises:
        RecordUnreadable: when `data` does not start with an intact header of this version.
    """
    if len(data) < HEADER_BYTES:
        raise RecordUnreadable(f"{len(data)} bytes are fewer than a record's header has.", "torn")
    raw = bytes(data[:HEADER_BYTES])
    if not raw.startswith(_MAGIC):
        raise RecordUnreadable("The bytes do not start with a record.", "damaged")
    body_bytes = HEADER_BYTES - _HEADER_SEAL_BYTES
    if xxhash.xxh3_64_digest(raw[:body_bytes]) != raw[body_bytes:]:
        raise RecordUnreadable("The record's header does not match its checksum.", "damaged")
    _, version, rank, world_size, kind, tokens, payload_bytes, name, namespace_digits = (
        _FIELDS.unpack_from(raw)
    )
    if version != limits.RECORD_FORMAT_VERSION:
        raise RecordUnreadable(
            f"The record has format {version}, not {limits.RECORD_FORMAT_VERSION}.", "version"
        )
    if kind >= len(_KINDS) or not _NAMESPACE.fullmatch(namespace_digits):
        raise RecordUnreadable("The record's header has invalid fields.", "damaged")
    namespace = namespace_digits.rstrip(b"\0").decode("ascii")
    identity = RecordIdentity(namespace, rank, world_size, name, _KINDS[kind], tokens)
    return identity, payload_bytes


class RecordChecker:
    """Incremental check of one record: the header first, then the payload piece by piece.

    A piece that is hashed right after it was read is still in the processor's cache.
    """

    def __init__(self, header: bytes | bytearray | memoryview, size_bytes: int) -> None:
        """Compare the header with its checksum, and its payload length with the record's length.

        Args:
            header: the record's first HEADER_BYTES bytes.
            size_bytes: length of the whole record according to its index.

        Raises:
            RecordUnreadable: when the header is not intact, or the lengths differ.
        """
        self.identity, payload_bytes = read_header(header)
        if size_bytes != HEADER_BYTES + payload_bytes:
            raise RecordUnreadable(
                f"The record should have {HEADER_BYTES + payload_bytes} bytes and has "
                f"{size_bytes}.",
                "torn",
            )
        self._seal = bytes(header[_SEALED_BYTES : _SEALED_BYTES + _SEAL_BYTES])
        self._digest = xxhash.xxh3_128(header[:_SEALED_BYTES])

    def add(self, piece: memoryview) -> None:
        """Add the next piece of the payload to the checksum, in the order of the record's bytes."""
        self._digest.update(piece)

    def finish(self, expected: RecordIdentity | None) -> None:
        """Compare the added pieces with the record's checksum. Only then may the payload be used.

        Args:
            expected: identity that the record must have; None accepts any.

        Raises:
            RecordUnreadable: when the payload is damaged or the identity differs.
        """
        if self._digest.digest() != self._seal:
            raise RecordUnreadable("The record's payload does not match its checksum.", "damaged")
        if expected is not None and self.identity != expected:
            fields = (field.name for field in dataclasses.fields(RecordIdentity))
            differing = [f for f in fields if getattr(self.identity, f) != getattr(expected, f)]
            raise RecordUnreadable(
                f"The record belongs to another block; differing in {', '.join(differing)}.",
                "identity",
            )


def check_record(
    record: memoryview | bytes, expected: RecordIdentity | None
) -> tuple[RecordIdentity, memoryview]:
    """Compare a whole record with its checksums and with the expected identity.

    Args:
        record: exactly one record, contiguous.
        expected: identity that the record must have; None accepts any.

    Returns:
        The record's identity, and a view of its payload (bytes, not copied).

    Raises:
        RecordUnreadable: when the record is torn, damaged, or of another version or identity.
    """
    view = memoryview(record).cast("B")
    checker = RecordChecker(view[:HEADER_BYTES], view.nbytes)
    payload = view[HEADER_BYTES:]
    checker.add(payload)
    checker.finish(expected)
    return checker.identity, payload
