"""Messages between a rank worker, a gateway or `lockstep cache` and its host's cache store.

They contain no KV bytes: ranks write and read the files with blocks themselves. Documents, which a
gateway keeps for its clients, are part of their messages.
"""

from typing import Annotated

from msgspec import Meta

from shared import limits
from shared.messages.base import (
    BlockHash,
    Count,
    Message,
    MessagePart,
    Namespace,
    Seconds,
    ShortText,
)

Hashes = Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)]
FileName = Annotated[
    str, Meta(min_length=1, max_length=255, pattern=r"\A[0-9A-Za-z_-][0-9A-Za-z._-]*\Z")
]

Owner = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"\A[0-9a-f]+\Z")]
"""Digest that a gateway makes of the tenant whose document it is."""
DocumentName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"\A[0-9A-Za-z_-]+\Z")]
DocumentBytes = Annotated[bytes, Meta(max_length=limits.DOCUMENT_BYTES_MAX)]


class OpenNamespace(Message, frozen=True, kw_only=True):
    """Order: this peer writes and reads blocks of one rank in one namespace from now on."""

    namespace: Namespace
    rank: Annotated[int, Meta(ge=0, lt=limits.RANKS_MAX)]
    world_size: Annotated[int, Meta(ge=1, le=limits.RANKS_MAX)]


class NamespaceOpened(Message, frozen=True, kw_only=True):
    """Answer to OpenNamespace: where to write. Sent again when the store switches on or off."""

    namespace: Namespace
    folder: ShortText
    """Absolute path in which the peer may write files whose names start with `partial-`; "" while
    the store is off."""


class LocateBlocks(Message, frozen=True, kw_only=True):
    """Query: in which files are these records? Those found count as used and are pinned.

    Pinned files are not deleted before ReleaseBlocks with the same `query_id`.
    """

    query_id: Count
    hashes: Hashes


class BlockPlace(MessagePart, frozen=True, kw_only=True):
    """Location of a record in the files of its rank and namespace."""

    name: FileName
    """File in the namespace's folder for this rank."""
    offset: Count
    """Position of the record's first byte."""
    size_bytes: Count
    """Length of the record, including its header."""


class BlocksLocated(Message, frozen=True, kw_only=True):
    """Answer to LocateBlocks with one place per hash, None for a hash without a record."""

    query_id: Count
    places: Annotated[list[BlockPlace | None], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)]


class ReleaseBlocks(Message, frozen=True, kw_only=True):
    """Order: unpin the records located for this query, because the peer does not read them now."""

    query_id: Count


class WrittenRecord(MessagePart, frozen=True, kw_only=True):
    """One record in a file that a rank has written."""

    hash: BlockHash
    offset: Count
    size_bytes: Annotated[int, Meta(ge=1)]


class CommitBlocks(Message, frozen=True, kw_only=True):
    """Order: take over a written and closed file. Its records can be located afterwards."""

    name: FileName
    """The `partial-` file in the namespace's folder."""
    records: Annotated[
        list[WrittenRecord], Meta(min_length=1, max_length=limits.BLOCKS_PER_MESSAGE_MAX)
    ]
    evict_first: Hashes = []
    """See SpillOrder."""


class BlocksCommitted(Message, frozen=True, kw_only=True):
    """Answer to CommitBlocks. A file refused for its content or for lack of room is deleted."""

    name: FileName
    accepted: bool
    detail: ShortText = ""
    """Why it was refused; "" if it was accepted."""
    store_bytes: Count = 0
    """Bytes of all records in the store now."""


class QuarantineBlocks(Message, frozen=True, kw_only=True):
    """Order: never locate these damaged records again. The store keeps some for examination."""

    hashes: Hashes
    cause: ShortText


class SpillFailed(Message, frozen=True, kw_only=True):
    """Fact: this peer cannot write into its namespace's folder. The store then checks its disk."""

    detail: ShortText


class KeepDocument(Message, frozen=True, kw_only=True):
    """Order: store a document, in place of the owner's earlier one of this name."""

    owner: Owner
    name: DocumentName
    """Name of the document."""
    data: DocumentBytes


class DocumentKept(Message, frozen=True, kw_only=True):
    """Answer to KeepDocument: the document can be read from now on, or was refused."""

    owner: Owner
    name: DocumentName
    """Name of the document."""
    accepted: bool
    """The document can be read now."""
    detail: ShortText = ""
    """Why it was refused; "" if it was accepted."""


class ReadDocument(Message, frozen=True, kw_only=True):
    """Query of a document, which counts as a use of it."""

    query_id: Count
    owner: Owner
    name: DocumentName
    """Name of the document."""


class DocumentRead(Message, frozen=True, kw_only=True):
    """Answer to ReadDocument."""

    query_id: Count
    data: DocumentBytes | None
    """None: there is no such document."""


class DeleteDocument(Message, frozen=True, kw_only=True):
    """Order: delete a document."""

    query_id: Count
    owner: Owner
    name: DocumentName
    """Name of the document."""


class DocumentDeleted(Message, frozen=True, kw_only=True):
    """Answer to DeleteDocument."""

    query_id: Count
    existed: bool
    """There was such a document."""


class QueryStore(Message, frozen=True, kw_only=True):
    """Query of the store's state. The answer is StoreReported."""


class StoreReported(Message, frozen=True, kw_only=True):
    """Fact: the state of the store. Also sent to every peer when the store switches off or on."""

    on: bool
    cause: ShortText
    """Why it is off; "" if it is on."""
    directory: ShortText
    bytes_used: Count
    bytes_max: Count
    ttl_s: Seconds = 0.0
    """Time after its last use at which a record is deleted; 0: never."""
    records: Count
    namespaces: Count
    documents: Count = 0
    """Documents of all owners."""
    documents_bytes: Count = 0
    documents_bytes_max: Count = 0
    """Bytes above which the store deletes the documents used longest ago."""
    foreign_files: Count
    """Files in the directory that the store did not write. They are left unchanged."""
    started_s: Seconds
    """Duration of rebuilding the index."""
    counters: dict[str, float]
    """Monotonic sums since the store's start, by Prometheus-style names."""


class ListBlocks(Message, frozen=True, kw_only=True):
    """Query of the stored records per rank and namespace, one page at a time."""

    page: Count = 0


class StoredFolder(MessagePart, frozen=True, kw_only=True):
    """Number, bytes and last use of the stored records of one rank in one namespace."""

    namespace: Namespace
    rank: Count
    world_size: Count
    records: Count
    size_bytes: Count
    used_s: Seconds
    """Seconds since one of them was last located or committed."""


class BlocksListed(Message, frozen=True, kw_only=True):
    """Answer to ListBlocks: one page of folders, sorted by namespace, rank and world size."""

    folders: Annotated[list[StoredFolder], Meta(max_length=1_024)]
    more: bool
    """A further page exists."""


class ClearBlocks(Message, frozen=True, kw_only=True):
    """Order: delete the records of a namespace, or of all; pinned ones when they are released."""

    namespace: Namespace = ""
    """"": all."""


class BlocksCleared(Message, frozen=True, kw_only=True):
    """Answer to ClearBlocks: number of the deleted records, and bytes of their files."""

    records: Count
    size_bytes: Count
