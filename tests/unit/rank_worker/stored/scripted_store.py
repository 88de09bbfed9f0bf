"""A cache store on a real socket with real files and switchable faults."""

import contextlib
import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.errors import PeerUnknown
from shared.identifiers import PeerId
from shared.messages import (
    BlockPlace,
    BlocksCommitted,
    BlocksLocated,
    CommitBlocks,
    LocateBlocks,
    Message,
    NamespaceOpened,
    OpenNamespace,
    QuarantineBlocks,
    ReleaseBlocks,
    ToStore,
)
from shared.transport.links import Listener, Received


class ScriptedStore:
    """A store in a thread; `messages` are all that it received, the switches set its faults."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/store.sock"
        self.blocks = folder / "blocks"
        self.messages: list[Message] = []
        self.places: dict[bytes, BlockPlace] = {}
        self.pins: dict[int, list[bytes]] = {}
        self.is_off = False
        self.refuses_commits = False
        self.is_mute = False
        """Receives messages and answers none."""
        self.folder = Path()
        self._commits = 0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._link: Listener[Any] | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Listen; committed records of earlier runs are located again."""
        self._stop.clear()
        self._link = Listener(self.address, ToStore)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def kill(self, *, with_goodbye: bool = False) -> None:
        """Stop as a killed process does, or as one that closes its link."""
        self._stop.set()
        assert self._link is not None
        assert self._thread is not None
        self._link.wake()
        self._thread.join()
        if with_goodbye:
            self._link.close(0.0)
        else:
            self._link.socket.close()
        self.pins.clear()
        self._thread = None

    def close(self) -> None:
        """Stop the thread if it runs, and delete all files."""
        if self._thread is not None:
            self.kill()
        shutil.rmtree(self.blocks, ignore_errors=True)

    def switch(self, *, off: bool) -> None:
        """Switch the store off or on and notify the rank."""
        self.is_off = off
        self.answer_again(self.messages_of(OpenNamespace)[-1])

    def answer_again(self, message: Message) -> None:
        """Answer a message that was received earlier."""

        def answer() -> None:
            assert self._link is not None
            for peer in self._link.peers:
                self._answer(peer, message)

        self._jobs.put(answer)
        assert self._link is not None
        self._link.wake()

    def messages_of(self, kind: type[Any]) -> list[Any]:
        """Return all received messages of one type."""
        return [one for one in self.messages if isinstance(one, kind)]

    def damage(self, block_hash: bytes, at: int, flipped: int = 0x40) -> None:
        """Flip bits of one byte of a record, at an offset from its start."""
        place = self.places[block_hash]
        with (self.folder / place.name).open("r+b") as file:
            file.seek(place.offset + at)
            byte = file.read(1) or b"\0"
            file.seek(place.offset + at)
            file.write(bytes([byte[0] ^ flipped]))

    def _run(self) -> None:
        assert self._link is not None
        while not self._stop.is_set():
            for event in self._link.poll(0.05):
                if isinstance(event, Received):
                    self.messages.append(event.message)
                    if not self.is_mute:
                        self._answer(event.peer, event.message)
            while not self._jobs.empty():
                self._jobs.get()()

    def _answer(self, peer: PeerId, message: Message) -> None:
        match message:
            case OpenNamespace():
                self._open(peer, message)
            case CommitBlocks():
                self._send(peer, self._commit(message))
            case LocateBlocks():
                places = [self.places.get(one) for one in message.hashes]
                self.pins[message.query_id] = message.hashes
                self._send(peer, BlocksLocated(query_id=message.query_id, places=places))
            case ReleaseBlocks():
                del self.pins[message.query_id]
            case QuarantineBlocks():
                for one in message.hashes:
                    self.places.pop(one, None)

    def _send(self, peer: PeerId, message: Message) -> None:
        assert self._link is not None
        with contextlib.suppress(PeerUnknown):  # the peer has left
            self._link.send(peer, message)

    def _open(self, peer: PeerId, message: OpenNamespace) -> None:
        name = f"rank-{message.rank}-of-{message.world_size}"
        self.folder = self.blocks / message.namespace / name
        if not self.is_off:
            self.folder.mkdir(parents=True, exist_ok=True)
        folder = "" if self.is_off else str(self.folder)
        self._send(peer, NamespaceOpened(namespace=message.namespace, folder=folder))

    def _commit(self, message: CommitBlocks) -> BlocksCommitted:
        path = self.folder / message.name
        if self.refuses_commits or not path.exists():
            path.unlink(missing_ok=True)
            return BlocksCommitted(name=message.name, accepted=False, detail="refused")
        self._commits += 1
        taken = f"records-{self._commits}"
        path.rename(self.folder / taken)
        for one in message.records:
            self.places[one.hash] = BlockPlace(
                name=taken, offset=one.offset, size_bytes=one.size_bytes
            )
        total = sum(place.size_bytes for place in self.places.values())
        return BlocksCommitted(name=message.name, accepted=True, store_bytes=total)
