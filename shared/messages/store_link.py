"""The link between a rank worker (or `lockstep cache`) and the cache store of its host.

Words only: KV bytes travel through files that the rank writes and reads itself.
"""

from typing import Annotated

from msgspec import Meta, Struct

from shared import limits
from shared.messages.base import BlockHash, Count, Message, Namespace, Seconds, ShortText

Hashes = Annotated[list[BlockHash], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)]
FileName = Annotated[
    str, Meta(min_length=1, max_length=255, pattern=r"\A[0-9A-Za-z_-][0-9A-Za-z._-]*\Z")
]


class OpenNamespace(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: this peer writes and reads blocks of one rank in one namespace from here on."""

    namespace: Namespace
    rank: Annotated[int, Meta(ge=0, lt=limits.RANKS_MAX)]
    world_size: Annotated[int, Meta(ge=1, le=limits.RANKS_MAX)]


class NamespaceOpened(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Answer to OpenNamespace."""

    namespace: Namespace
    folder: ShortText
    """Absolute path where the peer may write files whose names begin with `partial-`; "" while the
    store is off."""


class LocateBlocks(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Question: where are these? What is found counts as used, and is pinned until released."""

    query_id: Count
    hashes: Hashes


class BlockPlace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Where a record lies."""

    name: FileName
    """File in the namespace's folder for this rank."""
    offset: Count
    """First byte of the record."""
    size_bytes: Count
    """Length of the record, header included."""


class BlocksLocated(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Answer to LocateBlocks; a place per hash asked for, None where there is no such record."""

    query_id: Count
    places: Annotated[list[BlockPlace | None], Meta(max_length=limits.BLOCKS_PER_MESSAGE_MAX)]


class ReleaseBlocks(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: the answer to this query is not used any more; unpin its blocks."""

    query_id: Count


class WrittenRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One record in a file that a rank has written."""

    hash: BlockHash
    offset: Count
    size_bytes: Annotated[int, Meta(ge=1)]


class CommitBlocks(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: take over a file that is written and closed; its records can be located from then."""

    name: FileName
    """The `partial-` file in the namespace's folder."""
    records: Annotated[
        list[WrittenRecord], Meta(min_length=1, max_length=limits.BLOCKS_PER_MESSAGE_MAX)
    ]
    evict_first: Hashes = []
    """See SpillOrder."""


class BlocksCommitted(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Answer to CommitBlocks. A file that is refused is deleted."""

    name: FileName
    accepted: bool
    detail: ShortText = ""
    """Why not; "" when accepted."""
    store_bytes: Count = 0
    """Bytes of all records that the store holds now."""


class QuarantineBlocks(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: these records are not what they should be; never locate them again, keep some."""

    hashes: Hashes
    cause: ShortText


class SpillFailed(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: writing into the namespace's folder failed; the store shall look at its disk."""

    detail: ShortText


class QueryStore(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Question: how are you? Answer: StoreReported."""


class StoreReported(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: the state of the store. Told to every peer when it switches itself off or on."""

    on: bool
    cause: ShortText
    """Why it is off; "" when it is on."""
    directory: ShortText
    bytes_used: Count
    bytes_max: Count
    records: Count
    namespaces: Count
    foreign_files: Count
    """Files in the directory that are not ours; they are left alone."""
    started_s: Seconds
    """How long the index took to rebuild."""
    counters: dict[str, float]
    """Monotonic sums since the store started, Prometheus style names."""


class ListBlocks(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Question: what is there? One page, by folder."""

    page: Count = 0


class StoredFolder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The records of one rank in one namespace."""

    namespace: Namespace
    rank: Count
    world_size: Count
    records: Count
    size_bytes: Count
    used_s: Seconds
    """Seconds since one of them was located or committed."""


class BlocksListed(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Answer to ListBlocks."""

    folders: Annotated[list[StoredFolder], Meta(max_length=1_024)]
    more: bool
    """There is another page."""


class ClearBlocks(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: delete the records of a namespace, or of all; pinned ones go when released."""

    namespace: Namespace = ""
    """"": all."""


class BlocksCleared(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Answer to ClearBlocks."""

    records: Count
    size_bytes: Count
