"""The store's core on a real directory, without sockets: tell it something, see what it answers."""

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
    """Return the one payload that a block of this hash has."""
    return (name[-4:] * (size_bytes // 4 + 1))[:size_bytes]


def identity_of(folder: FolderKey, name: bytes) -> RecordIdentity:
    """Return who the block of a hash is in a rank's folder."""
    return RecordIdentity(*folder, name, "block", 16)


def record_of(identity: RecordIdentity, size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the one record of a block."""
    payload = payload_of(identity.hash, size_bytes)
    return build_header(identity, payload) + payload


class Rank:
    """One peer: writes files as a rank does, and reads what it is told, checking every byte."""

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
        order = OpenNamespace(namespace=self.namespace, rank=self.rank, world_size=self.world_size)
        self.folder = self.tell(order, NamespaceOpened).folder
        return self.folder

    def leave(self, cause: str = "goodbye") -> None:
        """End the session."""
        self.store.handle(Lost(self.peer, cause))

    def tell(self, message: ToStore, answer: type[A]) -> A:
        """Send a message; return the one answer of this type."""
        (found,) = [one for one in self.store.told(self.peer, message) if isinstance(one, answer)]
        return found

    def say(self, message: ToStore) -> None:
        """Send a message that is not answered."""
        self.store.told(self.peer, message)

    def identity(self, name: bytes) -> RecordIdentity:
        """Return what the record of a hash must say."""
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
        """Write a file with these blocks and have it taken over."""
        name, records = self.write(*numbers, size_bytes=size_bytes)
        order = CommitBlocks(
            name=name, records=records, evict_first=[block_hash(one) for one in evict_first]
        )
        return self.tell(order, BlocksCommitted)

    def locate(self, *numbers: int) -> tuple[int, list[BlockPlace | None]]:
        """Ask where blocks are; return the question's number and the places."""
        self._queries += 1
        question = LocateBlocks(
            query_id=self._queries, hashes=[block_hash(number) for number in numbers]
        )
        located = self.tell(question, BlocksLocated)
        assert located.query_id == self._queries
        assert len(located.places) == len(numbers)
        return self._queries, located.places

    def release(self, query_id: int) -> None:
        """Unpin what a question has pinned."""
        self.say(ReleaseBlocks(query_id=query_id))

    def has(self, *numbers: int) -> list[bool]:
        """Tell which blocks can be located and read, and leave nothing pinned."""
        query_id, places = self.locate(*numbers)
        readable = [
            place is not None and self.read(place, block_hash(number)) is not None
            for number, place in zip(numbers, places, strict=True)
        ]
        self.release(query_id)
        return readable

    def read(self, place: BlockPlace, name: bytes) -> bytes | None:
        """Return a payload as a rank would use it; None where it is a miss."""
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
    """The core, its disk, and a clock that stands still unless it is told to move."""

    def __init__(self, path: Path, bytes_max: int = NO_LIMIT) -> None:
        self.clock = ManualClock(1_000.0)
        self.directory = Directory(path, bytes_max, "")
        self.core = StoreCore(str(self.directory.path))
        self.disk = Disk(self.directory)
        self.said: list[WriteLog] = []
        self.sent: list[Send] = []
        self.performed: list[Action] = []
        self.handle(TimePassed())

    def close(self) -> None:
        """Give the directory back, as the end of a process does."""
        self.directory.release()

    def told(self, peer: PeerId, message: ToStore) -> list[msgspec.Struct]:
        """Hand a peer's message over; return what that peer is sent for it."""
        before = len(self.sent)
        self.handle(Received(peer, 0, message))
        return [send.message for send in self.sent[before:] if send.peer == peer]

    def handle(self, event: Event) -> None:
        """Have an event handled, and whatever it leads to."""
        waiting = [event]
        while waiting:
            for action in self.core.handle(waiting.pop(0), self.clock.now()):
                self.performed.append(action)
                match action:
                    case Send():
                        self.sent.append(action)
                    case WriteLog():
                        self.said.append(action)
                    case OpenDirectory():
                        waiting.append(self.disk.open())
                    case _:
                        waiting += self.disk.perform(action)
        self.core.check_invariants()

    def pass_time(self, seconds: float) -> None:
        """Move the clock, looking at it as often as the shell does where it matters."""
        while seconds > 0.0:
            step_s = min(seconds, PROBE_EVERY_S)
            self.clock.advance(step_s)
            self.handle(TimePassed())
            seconds -= step_s

    def report(self) -> StoreReported:
        """Return the store's state."""
        peer = PeerId(b"asks")
        self.handle(Connected(peer))
        (report,) = self.told(peer, QueryStore())
        self.handle(Lost(peer, "goodbye"))
        assert isinstance(report, StoreReported)
        return report

    def files(self) -> list[Path]:
        """Return every file with records that lies on the disk."""
        return sorted(self.directory.path.glob("*/rank-*/*.blocks"))

    def events(self) -> list[str]:
        """Return the names of all log lines so far."""
        return [say.event for say in self.said]
