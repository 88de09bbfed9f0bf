"""The bytes of a stored block: who it is, its payload, and checksums over both.

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
    64     64  namespace in hexadecimal digits, zeros behind it
   128    104  zero
   232     16  xxh3_128 of bytes 0 to 231 and the payload
   248      8  xxh3_64 of bytes 0 to 247
   256      -  payload
```

Numbers are little-endian. Records stand in a file one behind the other, without gaps. The second
checksum makes a header believable by itself, so that an index is rebuilt without reading payloads;
the first one ties the payload to the identity, so that no other block's bytes, whole as they may
be, pass for this one. xxh3 finds accidents, not forgers: those are kept out by the folder's mode.
"""

import dataclasses
import re
import struct
from typing import Final, Literal

import xxhash

from shared import limits
from shared.errors import LockstepError

HEADER_BYTES: Final = 256
"""Where the payload begins, counted from the record's first byte."""

_MAGIC = b"LSBLOCK\n"
_FIELDS = struct.Struct("<8sHHHBxI4xQ32s64s")
_SEALED_BYTES = 232
_SEAL = struct.Struct("<16s")
_HEADER_SEAL = struct.Struct("<8s")
_NAMESPACE = re.compile(rb"[0-9a-f]*\x00*")
_KINDS: tuple[Literal["block", "checkpoint"], ...] = ("block", "checkpoint")

Cause = Literal["torn", "damaged", "version", "identity"]


class RecordUnreadable(LockstepError):
    """Bytes that are not the record they should be: a miss, never a reason to fail.

    `cause` is one word of `Cause`, for counters: cut off or padded, changed, written by another
    version, or another record than the one asked for.
    """

    def __init__(self, sentence: str, cause: Cause) -> None:
        super().__init__(sentence)
        self.cause: Cause = cause


@dataclasses.dataclass(frozen=True, slots=True)
class RecordIdentity:
    """Everything that must agree before a record's payload may be used."""

    namespace: str
    """0 to 64 lower-case hexadecimal digits."""
    rank: int
    world_size: int
    hash: bytes
    """32 bytes."""
    kind: Literal["block", "checkpoint"]
    tokens: int
    """Of a block: how many it holds. Of a checkpoint: how many lie before it."""


def build_header(identity: RecordIdentity, payload: memoryview | bytes) -> bytes:
    """Return the HEADER_BYTES bytes that stand before `payload` in its record.

    Args:
        identity: what the payload is.
        payload: contiguous bytes of any item type; read once, not copied.
    """
    space = identity.namespace.encode("ascii")
    assert len(identity.hash) == 32
    assert len(space) <= 64
    assert _NAMESPACE.fullmatch(space)
    sealed = _FIELDS.pack(
        _MAGIC,
        limits.RECORD_FORMAT_VERSION,
        identity.rank,
        identity.world_size,
        _KINDS.index(identity.kind),
        identity.tokens,
        memoryview(payload).nbytes,
        identity.hash,
        space,
    ).ljust(_SEALED_BYTES, b"\0")
    body = sealed + _SEAL.pack(_seal(sealed, payload))
    return body + _HEADER_SEAL.pack(xxhash.xxh3_64_digest(body))


def read_header(data: bytes | bytearray | memoryview) -> tuple[RecordIdentity, int]:
    """Return the identity and the payload's length in bytes, as the header at `data[0]` says.

    What it says is whole and of this version; whether the payload is too, only `check_record` can
    tell.

    Raises:
        RecordUnreadable: `data` does not begin with a header of this version.
    """
    if len(data) < HEADER_BYTES:
        raise RecordUnreadable(f"{len(data)} bytes are too few for a record's header.", "torn")
    raw = bytes(data[:HEADER_BYTES])
    if not raw.startswith(_MAGIC):
        raise RecordUnreadable("A record does not begin here.", "damaged")
    body_bytes = HEADER_BYTES - _HEADER_SEAL.size
    if xxhash.xxh3_64_digest(raw[:body_bytes]) != raw[body_bytes:]:
        raise RecordUnreadable("The record's header does not match its checksum.", "damaged")
    _, version, rank, world_size, kind, tokens, payload_bytes, name, space = _FIELDS.unpack_from(
        raw
    )
    if version != limits.RECORD_FORMAT_VERSION:
        raise RecordUnreadable(
            f"The record is of format {version}, not {limits.RECORD_FORMAT_VERSION}.", "version"
        )
    if kind >= len(_KINDS) or not _NAMESPACE.fullmatch(space):
        raise RecordUnreadable("The record's header holds what no version writes.", "damaged")
    namespace = space.rstrip(b"\0").decode("ascii")
    identity = RecordIdentity(namespace, rank, world_size, name, _KINDS[kind], tokens)
    return identity, payload_bytes


class RecordChecker:
    """Proves one record while its bytes come: its header, then its payload piece by piece.

    So every piece is hashed while the processor still has it at hand.
    """

    def __init__(self, head: bytes | bytearray | memoryview, size_bytes: int) -> None:
        """Begin with the header.

        Args:
            head: the first HEADER_BYTES bytes of the record.
            size_bytes: of the whole record, as whoever knows its place says.

        Raises:
            RecordUnreadable: no header of this version, or the record has another length.
        """
        self.identity, payload_bytes = read_header(head)
        if size_bytes != HEADER_BYTES + payload_bytes:
            raise RecordUnreadable(
                f"The record should have {HEADER_BYTES + payload_bytes} bytes and has "
                f"{size_bytes}.",
                "torn",
            )
        self._seal = bytes(head[_SEALED_BYTES : _SEALED_BYTES + _SEAL.size])
        self._digest = xxhash.xxh3_128(head[:_SEALED_BYTES])

    def add(self, piece: memoryview) -> None:
        """Take in the next bytes of the payload."""
        self._digest.update(piece)

    def finish(self, expected: RecordIdentity | None) -> None:
        """Conclude, when the whole payload was added: only now may it be used.

        Args:
            expected: what the record must be; None: anything that is whole.

        Raises:
            RecordUnreadable: it is changed, or of another identity.
        """
        if self._digest.digest() != self._seal:
            raise RecordUnreadable("The record's payload does not match its checksum.", "damaged")
        if expected is not None and self.identity != expected:
            fields = (field.name for field in dataclasses.fields(RecordIdentity))
            differing = [f for f in fields if getattr(self.identity, f) != getattr(expected, f)]
            raise RecordUnreadable(
                f"The record is another one's: {', '.join(differing)}.", "identity"
            )


def check_record(
    record: memoryview | bytes, expected: RecordIdentity | None
) -> tuple[RecordIdentity, memoryview]:
    """Return what a record is and a view of its payload, once every byte of it is proven.

    Args:
        record: one whole record, no byte more or less; contiguous.
        expected: what it must be; None: anything that is whole.

    Raises:
        RecordUnreadable: it is torn, padded, changed, of another version or another identity.
    """
    view = memoryview(record).cast("B")
    proof = RecordChecker(view[:HEADER_BYTES], view.nbytes)
    payload = view[HEADER_BYTES:]
    proof.add(payload)
    proof.finish(expected)
    return proof.identity, payload


def _seal(sealed: bytes, payload: memoryview | bytes) -> bytes:
    digest = xxhash.xxh3_128(sealed)
    digest.update(payload)
    return digest.digest()
