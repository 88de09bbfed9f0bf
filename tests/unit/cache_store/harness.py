"""The store's core on a real directory with a manual clock, without sockets."""

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from services.cache_store.core import StoreCore
from services.cache_store.events import (
    Action,
    Event,
    OpenDirectory,
    Send,
    TimePassed,
    WriteLog,
)
from services.cache_store.file_names import FolderKey
from services.cache_store.files.directory import Directory
from services.cache_store.files.disk import Disk
from services.cache_store.records.documents import DocumentLimits
from services.cache_store.switch import PROBE_EVERY_S
from shared.block_record import (
    HEADER_BYTES,
    RecordIdentity,
    RecordUnreadable,
    build_header,
    check_record,
)
from shared.clock import ManualClock
from shared.identifiers import PeerId
from shared.messages import (
    BlockPlace,
    BlocksCommitted,
    BlocksLocated,
    CommitBlocks,
    LocateBlocks,
    NamespaceOpened,
    OpenNamespace,
    QueryStore,
    ReleaseBlocks,
    StoreReported,
    ToStore,
    WrittenRecord,
)
from shared.transport.link_events import Connected, Lost, Received

A = TypeVar("A", bound=msgspec.Struct)
NAMESPACE = "ab" * 32
PAYLOAD_BYTES = 100
RECORD_BYTES = HEADER_BYTES + PAYLOAD_BYTES
NO_LIMIT = 2**40


def block_hash(number: int) -> bytes:
    """Return the hash of block `number`."""
    return number.to_bytes(32, "big")


def payload_of(name: bytes, size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the payload of the block with this hash; always the same bytes."""
    return (name[-4:] * (size_bytes // 4 + 1))[:size_bytes]


def identity_of(folder: FolderKey, name: bytes) -> RecordIdentity:
    """Return the identity of a block's record in a rank's folder."""
    return RecordIdentity(*folder, name, "block", 16)


def record_of(identity: RecordIdentity, size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the complete record of a block: header, then payload."""
    payload = payload_of(identity.hash, size_bytes)
    return build_header(identity, payload) + payload


class Rank:
    """A rank's side of the store: writes files, and checks every byte that it reads."""

    def __init__(
        self,
        store: "Store",
        name: str = "rank",
        *,
        namespace: str = NAMESPACE,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.store = store
        self.peer = PeerId(name.encode())
        self.namespace = namespace
        self.rank = rank
        self.world_size = world_size
        self.folder = ""
        self._written = 0
        self._queries = 0
        store.handle(Connected(self.peer))
        self.open()

    def open(self) -> str:
        """Open the namespace; return the folder."""
        request = OpenNamespace(
            namespace=self.namespace, rank=self.rank, world_size=self.world_size
        )
        self.folder = self.ask(request, NamespaceOpened).folder
        return self.folder

    def leave(self, cause: str = "goodbye") -> None:
        """End the session."""
        self.store.handle(Lost(self.peer, cause))

    def ask(self, message: ToStore, answer: type[A]) -> A:
        """Send a message and return its only answer of type `answer`."""
        (reply,) = [r for r in self.store.deliver(self.peer, message) if isinstance(r, answer)]
        return reply

    def send(self, message: ToStore) -> None:
        """Send a message that has no answer."""
        self.store.deliver(self.peer, message)

    def identity(self, name: bytes) -> RecordIdentity:
        """Return the identity that the record of this hash must have."""
        return identity_of(FolderKey(self.namespace, self.rank, self.world_size), name)

    def write(
        self, *numbers: int, size_bytes: int = PAYLOAD_BYTES
    ) -> tuple[str, list[WrittenRecord]]:
        """Write a file with these blocks; return its name and records."""
        records: list[WrittenRecord] = []
        data = b""
        for number in numbers:
            record = record_of(self.identity(block_hash(number)), size_bytes)
            records.append(
                WrittenRecord(hash=block_hash(number), offset=len(data), size_bytes=len(record))
            )
            data += record
        self._written += 1
        name = f"partial-{self.peer.decode()}-{self._written}"
        (Path(self.folder) / name).write_bytes(data)
        return name, records

    def commit(
        self,
        *numbers: int,
        evict_first: tuple[int, ...] = (),
        size_bytes: int = PAYLOAD_BYTES,
    ) -> BlocksCommitted:
        """Write a file with these blocks and ask the store to take it over."""
        name, records = self.write(*numbers, size_bytes=size_bytes)
        request = CommitBlocks(
            name=name, records=records, evict_first=[block_hash(one) for one in evict_first]
        )
        return self.ask(request, BlocksCommitted)

    def locate(self, *numbers: int) -> tuple[int, list[BlockPlace | None]]:
        """Ask where blocks are; return the query's id and the places."""
        self._queries += 1
        query = LocateBlocks(
            query_id=self._queries, hashes=[block_hash(number) for number in numbers]
        )
        located = self.ask(query, BlocksLocated)
        assert located.query_id == self._queries
        assert len(located.places) == len(numbers)
        return self._queries, located.places

    def release(self, query_id: int) -> None:
        """Release the pins of one query."""
        self.send(ReleaseBlocks(query_id=query_id))

    def has(self, *numbers: int) -> list[bool]:
        """Return for each block whether it can be located and read; leave no pins."""
        query_id, places = self.locate(*numbers)
        readable = [
            place is not None and self.read(place, block_hash(number)) is not None
            for number, place in zip(numbers, places, strict=True)
        ]
        self.release(query_id)
        return readable

    def read(self, place: BlockPlace, name: bytes) -> bytes | None:
        """Return the payload at a place, or None if the record is missing or invalid."""
        try:
            descriptor = os.open(Path(self.folder) / place.name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            data = os.pread(descriptor, place.size_bytes, place.offset)
            return bytes(check_record(data, self.identity(name))[1])
        except RecordUnreadable:
            return None
        finally:
            os.close(descriptor)


class Store:
    """The store's core with its disk and a manual clock."""

    def __init__(
        self,
        path: Path,
        bytes_max: int = NO_LIMIT,
        ttl_s: float = 0.0,
        document_limits: DocumentLimits = DocumentLimits(),  # noqa: B008 - it never changes
    ) -> None:
        self.clock = ManualClock(1_000.0)
        self.directory = Directory(path, bytes_max, "")
        self.core = StoreCore(str(self.directory.path), ttl_s, document_limits)
        self.disk = Disk(self.directory)
        self.log_lines: list[WriteLog] = []
        self.sent: list[Send] = []
        self.performed: list[Action] = []
        self.handle(TimePassed())

    def close(self) -> None:
        """Release the directory, as the end of a process does."""
        self.directory.release()

    def deliver(self, peer: PeerId, message: ToStore) -> list[msgspec.Struct]:
        """Deliver a peer's message; return the messages sent to that peer in response."""
        before = len(self.sent)
        self.handle(Received(peer, 0, message))
        return [send.message for send in self.sent[before:] if send.peer == peer]

    def handle(self, event: Event) -> None:
        """Handle an event and all events that its actions cause."""
        pending = [event]
        while pending:
            for action in self.core.handle(pending.pop(0), self.clock.now()):
                self.performed.append(action)
                match action:
                    case Send():
                        self.sent.append(action)
                    case WriteLog():
                        self.log_lines.append(action)
                    case OpenDirectory():
                        pending.append(self.disk.open())
                    case _:
                        pending += self.disk.perform(action)
        self.core.check_invariants()

    def advance_time(self, seconds: float) -> None:
        """Advance the clock in steps of the probe interval and handle each step."""
        while seconds > 0.0:
            step_s = min(seconds, PROBE_EVERY_S)
            self.clock.advance(step_s)
            self.handle(TimePassed())
            seconds -= step_s

    def report(self) -> StoreReported:
        """Return the store's state as a new peer receives it."""
        peer = PeerId(b"observer")
        self.handle(Connected(peer))
        (report,) = self.deliver(peer, QueryStore())
        self.handle(Lost(peer, "goodbye"))
        assert isinstance(report, StoreReported)
        return report

    def files(self) -> list[Path]:
        """Return all block files on the disk, sorted by path."""
        return sorted(self.directory.path.glob("*/rank-*/*.blocks"))

    def log_events(self) -> list[str]:
        """Return the event names of all log lines so far."""
        return [line.event for line in self.log_lines]
