"""Link to this host's cache store, which keeps documents for the gateway. Owns no document."""

import asyncio
import contextlib
import hashlib
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable

from services.gateway.links.loop_dialer import LoopDialer
from shared import limits
from shared.configuration.settings import Config
from shared.errors import ConfigError, LinkError, UnavailableError
from shared.log import Log
from shared.messages import (
    DeleteDocument,
    DocumentDeleted,
    DocumentKept,
    DocumentRead,
    FromStore,
    KeepDocument,
    QueryStore,
    ReadDocument,
    StoreReported,
    ToStore,
)
from shared.tenants.fair_share import FairShare
from shared.tenants.tenant_queues import TenantQueues
from shared.transport.links import Connected, LinkEvent, Lost, Received

ANSWER_S_MAX = 10.0
"""Longest wait for the store's answer; a disk that takes longer is broken."""

KEEPING_BYTES_MAX = 112 * 1024 * 1024
"""Bytes of documents that were sent and that the store has not written yet. Far enough below the
link's own bound for all other messages."""
READING_MAX = 4_096
"""Documents that requests wait for."""
READS_AT_ONCE = 4
"""Documents that the store is asked for at once. They arrive one after the other, each in up to
30 ms of the event loop, so a short document must not wait for all that another owner reads."""

_log = Log("gateway.documents")


class _Read:
    """A document to be read, which waits for its owner's turn."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Turns:
    """Owners take turns, and the last place is kept for an owner that has none."""

    def __init__(self) -> None:
        self._waiting: TenantQueues[_Read] = TenantQueues()
        self._places: Counter[str] = Counter()
        """Places that each owner occupies."""

    @contextlib.asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and occupy it during the block."""
        read = _Read(owner)
        self._waiting.add(owner, read)
        self._give_places()
        try:
            await read.turn
            yield
        finally:
            if not self._waiting.drop(owner, read):
                self._places -= Counter((owner,))
                self._give_places()

    def _give_places(self) -> None:
        while self._places.total() < READS_AT_ONCE:
            read = self._waiting.take(lambda read: self._places[read.owner] < READS_AT_ONCE - 1)
            if read is None:
                return
            self._places[read.owner] += 1
            if not read.turn.done():
                read.turn.set_result(None)


class DocumentClient:
    """Keeps, returns and deletes documents, each of one owner.

    Owners are texts of any length; the store sees their digests only. They share the
    capacity of the link in both directions, so that each finds room.
    """

    def __init__(self, config: Config) -> None:
        """Create it without a link; `start` connects it to the store, if that keeps documents.

        Must be called inside the event loop.
        """
        self._link = _link(config)
        self._has_disk = False
        """The store has reported that its disk is usable."""
        self._query_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[DocumentRead | DocumentDeleted]] = {}
        self._reading = FairShare(READING_MAX, config.tenants.share)
        self._turns = _Turns()
        self._keeping = FairShare(KEEPING_BYTES_MAX, config.tenants.share)
        self._keeping_bytes: defaultdict[str, deque[int]] = defaultdict(deque)
        """Bytes of each document that the store has not answered yet, by the digest of its owner.
        """

    @property
    def has_link(self) -> bool:
        """Whether there may be a store, now or later."""
        return self._link is not None

    @property
    def is_on(self) -> bool:
        """Whether the store is connected and its disk usable, so that documents are kept."""
        return self._has_disk

    def start(self) -> None:
        """Connect to the store, and again whenever it was away."""
        if self._link is not None:
            self._link.start(self._handle)

    def close(self) -> None:
        """Close the link, after the store has received all documents."""
        if self._link is not None:
            self._link.close()

    def keep(self, owner: str, name: str, data: bytes) -> bool:
        """Send a document to the store, without waiting for it to be written.

        A document that the store cannot keep is logged.

        Args:
            owner: who alone gets it back.
            name: its name among those of the owner.
            data: its content.

        Returns:
            Whether it was sent: False without a store, for a document that is too long, and while
            too many bytes of its owner are not written yet.
        """
        if not self._has_disk or len(data) > limits.DOCUMENT_BYTES_MAX:
            return False
        digest = _digest(owner)
        if not self._keeping.has_room(digest, len(data)):
            return False
        try:
            self._send(KeepDocument(owner=digest, name=name, data=data))
        except UnavailableError:
            return False
        self._keeping.add(digest, len(data))
        self._keeping_bytes[digest].append(len(data))
        return True

    async def load(self, owner: str, name: str) -> bytes | None:
        """Return a document; None if the owner has none with this name.

        Raises:
            UnavailableError: the store is away or does not answer, or too much is asked of it.
        """
        digest = _digest(owner)
        if not self._reading.take(digest, 1):
            raise UnavailableError("Too much is being read from the cache store for you.")
        try:
            async with self._turns.place(digest):
                answer = await self._ask(
                    lambda query_id: ReadDocument(query_id=query_id, owner=digest, name=name)
                )
        finally:
            self._reading.release(digest, 1)
        assert isinstance(answer, DocumentRead)
        return answer.data

    async def delete(self, owner: str, name: str) -> bool:
        """Delete a document; return whether the owner had one with this name.

        Raises:
            UnavailableError: as `load`.
        """
        answer = await self._ask(
            lambda query_id: DeleteDocument(query_id=query_id, owner=_digest(owner), name=name)
        )
        assert isinstance(answer, DocumentDeleted)
        return answer.existed

    async def _ask(self, question: Callable[[int], ToStore]) -> DocumentRead | DocumentDeleted:
        if not self._has_disk:
            raise UnavailableError("The cache store is not available.")
        query_id = next(self._query_ids)
        future: asyncio.Future[DocumentRead | DocumentDeleted]
        future = asyncio.get_running_loop().create_future()
        self._waiting[query_id] = future
        try:
            self._send(question(query_id))
            async with asyncio.timeout(ANSWER_S_MAX):
                return await future
        except TimeoutError:
            raise UnavailableError("The cache store does not answer.") from None
        finally:
            del self._waiting[query_id]

    def _send(self, message: ToStore) -> None:
        assert self._link is not None
        try:
            self._link.send(message)
        except LinkError as error:
            raise UnavailableError(f"The cache store is not available: {error}") from None

    def _handle(self, events: list[LinkEvent[FromStore]]) -> None:
        for event in events:
            match event:
                case Connected():
                    self._send(QueryStore())
                case Lost():
                    self._has_disk = False
                    for owner in list(self._keeping_bytes):
                        self._end_keeping(owner)
                    for future in self._waiting.values():
                        if not future.done():
                            future.set_exception(UnavailableError("The cache store was lost."))
                case Received(message=StoreReported(on=is_on)):
                    self._has_disk = is_on
                case Received(message=DocumentKept() as kept):
                    self._end_keeping(kept.owner, 1)
                    if not kept.accepted:
                        _log.warning("document_not_kept", name=kept.name, detail=kept.detail)
                case Received(message=DocumentRead() | DocumentDeleted() as answer):
                    waiting = self._waiting.get(answer.query_id)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
                case _:
                    pass

    def _end_keeping(self, owner: str, count: int | None = None) -> None:
        """Count documents of an owner as answered; None: all of them."""
        sizes = self._keeping_bytes[owner]
        for _ in range(len(sizes) if count is None else min(count, len(sizes))):
            self._keeping.release(owner, sizes.popleft())
        if not sizes:
            del self._keeping_bytes[owner]


def _link(config: Config) -> LoopDialer[FromStore] | None:
    """Return a link to the store; None if it keeps no documents or may not be reached."""
    if not config.cache.keeps_documents:
        return None
    try:
        return LoopDialer(config.store_address, FromStore, config.keys_dir, listener="store")
    except ConfigError as error:
        # Everything else works without documents.
        _log.warning("documents_not_kept", detail=str(error))
        return None


def _digest(owner: str) -> str:
    return hashlib.blake2b(owner.encode(), digest_size=16).hexdigest()
