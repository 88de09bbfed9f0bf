"""Documents that gateways keep. Owns their order of use, their limits and their ends; does no I/O.

Each owner has a part of the space, and the one with the most makes room for others. So no tenant
can push out what another one keeps.
"""

import dataclasses
import itertools
from collections.abc import Iterable

from services.cache_store import events
from services.cache_store.file_names import DocumentKey
from shared import messages
from shared.identifiers import PeerId

FILE_OVERHEAD_BYTES = 4_096
"""Space that a file takes beyond its content, so that many tiny documents are bounded too."""

NO_LIMIT = 2**60


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Bounds of all documents in a store."""

    bytes_max: int = NO_LIMIT
    """Bytes of all documents; 0: none is kept."""
    owner_bytes_max: int = NO_LIMIT
    """Bytes of one owner's documents."""
    ttl_s: float = 0.0
    """Seconds after their last use at which documents are deleted; 0: never."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    size_bytes: int
    used_at_s: float
    version: int
    """A number that no other document of any name has."""


class Documents:
    """The index of all documents, in the order of their use."""

    def __init__(
        self, actions: list[events.Action], counters: dict[str, float], limits: DocumentLimits
    ) -> None:
        """Start without documents.

        Args:
            actions: the core's actions, to which messages and file operations are appended.
            counters: the core's counters.
            limits: the bounds.
        """
        self.limits = limits
        self._actions = actions
        self._counters = counters
        self._owners: dict[str, dict[str, _Stored]] = {}
        """Documents by owner and name; those of an owner from the one used longest ago."""
        self._owner_bytes: dict[str, int] = {}
        self._total_bytes = 0
        self._versions = itertools.count(1)

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    @property
    def size_bytes(self) -> int:
        """Bytes of all documents with the overhead of their files."""
        return self._total_bytes

    def load(self, found: Iterable[events.FoundDocument], now_s: float) -> None:
        """Replace all documents by those of a scan; delete those beyond the limits.

        Args:
            found: the documents' files.
            now_s: the time in monotonic seconds.
        """
        self.unload()
        for document in sorted(found, key=lambda one: (-one.age_s, one.key)):
            size_bytes = document.size_bytes + FILE_OVERHEAD_BYTES
            self._add(document.key, size_bytes, now_s - document.age_s)
        for owner in list(self._owners):
            self._make_room(owner, 0)
        self.expire(now_s)

    def unload(self) -> None:
        """Forget all documents without deleting any."""
        self._owners.clear()
        self._owner_bytes.clear()
        self._total_bytes = 0

    def keep(
        self, peer: PeerId, message: messages.KeepDocument, now_s: float, off_cause: str
    ) -> None:
        """Have a document written, after making room for it, or refuse it.

        It is indexed from now on: later reads of it happen after the writing.

        Args:
            peer: the gateway.
            message: its order.
            now_s: the time in monotonic seconds.
            off_cause: why the store is off; "" while it is on.
        """
        key = DocumentKey(message.owner, message.name)
        size_bytes = len(message.data) + FILE_OVERHEAD_BYTES
        if off_cause:
            self._answer_kept(peer, key, off_cause)
        elif size_bytes > self.limits.owner_bytes_max:
            problem = f"It has {size_bytes} bytes; one owner has {self.limits.owner_bytes_max}."
            self._answer_kept(peer, key, problem)
        else:
            self._remove(key)
            self._make_room(key.owner, size_bytes)
            version = self._add(key, size_bytes, now_s)
            self._actions.append(events.WriteDocument(peer, key, version, message.data))

    def finish_write(self, written: events.DocumentWritten, off_cause: str) -> None:
        """Answer the gateway; forget a document that could not be written."""
        action = written.action
        refusal = written.refusal or off_cause
        if not refusal:
            self._counters["kept_documents_total"] += 1
        elif self._version(action.key) == action.version:
            self._remove(action.key)
        self._answer_kept(action.peer, action.key, refusal)

    def read(self, peer: PeerId, message: messages.ReadDocument, now_s: float) -> None:
        """Have a document read, or answer that it does not exist."""
        key = DocumentKey(message.owner, message.name)
        stored = self._owners.get(key.owner, {}).pop(key.name, None)
        if stored is None:
            self._answer_read(peer, message.query_id, None)
            return
        # Put at the end: it is the one used last.
        self._owners[key.owner][key.name] = dataclasses.replace(stored, used_at_s=now_s)
        self._actions.append(events.LoadDocument(peer, message.query_id, key, stored.version))

    def finish_read(self, loaded: events.DocumentLoaded) -> None:
        """Answer the gateway with a document, or forget one whose file is gone or damaged."""
        action = loaded.action
        if loaded.data is None and self._version(action.key) == action.version:
            self._remove(action.key)
            self._counters["damaged_documents_total"] += 1
        self._answer_read(action.peer, action.query_id, loaded.data)

    def delete(self, peer: PeerId, message: messages.DeleteDocument) -> None:
        """Delete a document and answer whether there was one."""
        existed = self._remove(DocumentKey(message.owner, message.name))
        answer = messages.DocumentDeleted(query_id=message.query_id, existed=existed)
        self._actions.append(events.Send(peer, answer))

    def expire(self, now_s: float) -> None:
        """Delete the documents that were not used for the time to live."""
        if not self.limits.ttl_s:
            return
        for owner, documents in list(self._owners.items()):
            while documents:
                name, stored = next(iter(documents.items()))
                if now_s - stored.used_at_s < self.limits.ttl_s:
                    break
                self._remove(DocumentKey(owner, name))

    def check_invariants(self) -> None:
        """Raise AssertionError if sums disagree or a limit is exceeded."""
        for owner, documents in self._owners.items():
            assert documents
            sizes = sum(stored.size_bytes for stored in documents.values())
            assert sizes == self._owner_bytes[owner] <= self.limits.owner_bytes_max
        assert self._owners.keys() == self._owner_bytes.keys()
        assert sum(self._owner_bytes.values()) == self._total_bytes <= self.limits.bytes_max

    def _add(self, key: DocumentKey, size_bytes: int, used_at_s: float) -> int:
        """Index a document that is not indexed; return its version."""
        version = next(self._versions)
        self._owners.setdefault(key.owner, {})[key.name] = _Stored(size_bytes, used_at_s, version)
        self._owner_bytes[key.owner] = self._owner_bytes.get(key.owner, 0) + size_bytes
        self._total_bytes += size_bytes
        return version

    def _version(self, key: DocumentKey) -> int | None:
        stored = self._owners.get(key.owner, {}).get(key.name)
        return None if stored is None else stored.version

    def _remove(self, key: DocumentKey) -> bool:
        """Forget a document and have its file deleted; return whether there was one."""
        documents = self._owners.get(key.owner, {})
        stored = documents.pop(key.name, None)
        if stored is None:
            return False
        self._owner_bytes[key.owner] -= stored.size_bytes
        self._total_bytes -= stored.size_bytes
        if not documents:
            del self._owners[key.owner], self._owner_bytes[key.owner]
        self._actions.append(events.RemoveDocument(key))
        return True

    def _make_room(self, owner: str, size_bytes: int) -> None:
        """Delete documents until one more of an owner fits.

        Those used longest ago go first: the owner's, as far as its part is exceeded, then those of
        the owner with the most bytes.
        """
        while self._owner_bytes.get(owner, 0) + size_bytes > self.limits.owner_bytes_max:
            self._evict(owner)
        while self._total_bytes + size_bytes > self.limits.bytes_max:
            self._evict(
                max(
                    self._owners,
                    key=lambda one: self._owner_bytes[one] + size_bytes * (one == owner),
                )
            )

    def _evict(self, owner: str) -> None:
        self._remove(DocumentKey(owner, next(iter(self._owners[owner]))))
        self._counters["evicted_documents_total"] += 1

    def _answer_kept(self, peer: PeerId, key: DocumentKey, refusal: str) -> None:
        answer = messages.DocumentKept(
            owner=key.owner, name=key.name, accepted=not refusal, detail=refusal
        )
        self._actions.append(events.Send(peer, answer))

    def _answer_read(self, peer: PeerId, query_id: int, data: bytes | None) -> None:
        answer = messages.DocumentRead(query_id=query_id, data=data)
        self._actions.append(events.Send(peer, answer))
