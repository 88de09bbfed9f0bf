"""Access to stored blocks. Asks the running cache store, or reads the directory if none runs."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from services.cache_store import file_names
from services.cache_store.core import StoreCore
from services.cache_store.events import Event, OpenDirectory, Send, TimePassed, WriteLog
from services.cache_store.files.directory import Directory, DirectoryHeld
from services.cache_store.files.disk import Disk
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.identifiers import PeerId
from shared.messages import BlocksListed, FromStore, ListBlocks, StoredFolder, ToStore
from shared.transport.links import Connected, Dialer, Received

ANSWER_DEADLINE_S = 5.0
"""Seconds within which the running store must answer."""
_CONNECT_DEADLINE_S = 1.0
_NO_LIMIT = 2**60
"""Limit that never evicts: asking must not delete blocks."""

A = TypeVar("A")


class RunningStore:
    """Link to the running cache store, which owns the directory of the blocks."""

    is_running = True

    def __init__(self, address: str, keys_dir: Path | None) -> None:
        self._clock = SystemClock()
        self._address = address
        self._link: Dialer[FromStore] = Dialer(
            address, "cache", FromStore, keys_dir=keys_dir, listener="store"
        )

    def ask(self, question: ToStore, answer: type[A]) -> A:
        """Send a question, or a request to delete, and return the answer.

        Args:
            question: the message to the store.
            answer: type of the message that answers it.

        Raises:
            UnavailableError: when no answer comes within ANSWER_DEADLINE_S.
        """
        until_s = self._clock.now() + ANSWER_DEADLINE_S
        if self._link.is_connected:
            self._link.send(question)
        while (left_s := until_s - self._clock.now()) > 0.0:
            for event in self._link.poll(left_s):
                match event:
                    case Connected():
                        self._link.send(question)
                    case Received(message=message) if isinstance(message, answer):
                        return message
        raise UnavailableError(f"The cache store at {self._address} does not answer.")

    def close(self) -> None:
        """Close the link."""
        self._link.close(wait_s=0.0)


class IdleDirectory:
    """Directory of the blocks while no cache store runs, locked for this one command."""

    is_running = False

    def __init__(self, directory: Directory) -> None:
        """Read the index. Raises: UnavailableError: when the disk fails."""
        self._clock = SystemClock()
        self._core = StoreCore(str(directory.path))
        self._disk = Disk(directory)
        self._peer = PeerId(b"cache")
        self._sent: list[object] = []
        self._trouble = ""
        self._handle(Connected(self._peer))
        self._handle(TimePassed())
        if not self._core.is_on:
            raise UnavailableError(self._trouble)

    def ask(self, question: ToStore, answer: type[A]) -> A:
        """Answer as `RunningStore.ask`. Raises: UnavailableError: the disk fails."""
        self._sent.clear()
        self._handle(Received(self._peer, 0, question))
        for message in self._sent:
            if isinstance(message, answer):
                return message
        raise UnavailableError(self._trouble)

    def _handle(self, event: Event) -> None:
        waiting = [event]
        while waiting:
            for action in self._core.handle(waiting.pop(0), self._clock.now()):
                match action:
                    case Send():
                        self._sent.append(action.message)
                    case WriteLog():
                        self._trouble = str(action.fields.get("cause", ""))
                    case OpenDirectory():
                        waiting.append(self._disk.open())
                    case _:
                        waiting += self._disk.perform(action)


Store = RunningStore | IdleDirectory
"""Source of answers about this host's stored blocks."""


@contextlib.contextmanager
def opened(config: Config) -> Iterator[Store | None]:
    """Give access to this host's stored blocks while the block runs.

    Yields:
        The running cache store if there is one, else its directory, locked for this process;
        None: no cache store has used the directory, so nothing is stored.

    Raises:
        ConfigError: when the directory belongs to another user, or is not a directory.
        UnavailableError: when its owner does not answer, or the disk fails.
    """
    address = config.store_address if _is_listening(config.store_address) else ""
    directory = Directory(config.cache_directory, _NO_LIMIT, "")
    if not address and (directory.path / file_names.LOCK).exists():
        try:
            directory.claim()
        except DirectoryHeld as held:
            if not held.address:
                raise UnavailableError(f"{held} It may be another `lockstep cache`.") from None
            address = held.address
        except OSError as error:
            raise UnavailableError(f"{directory.path} cannot be used: {error.strerror}.") from None
        else:
            try:
                yield IdleDirectory(directory)
            finally:
                directory.release()
            return
    if not address:
        yield None
        return
    with contextlib.closing(RunningStore(address, config.keys_dir)) as running:
        yield running


def list_folders(store: Store) -> list[StoredFolder]:
    """Return the stored records per namespace and rank."""
    folders: list[StoredFolder] = []
    page = 0
    while True:
        listed = store.ask(ListBlocks(page=page), BlocksListed)
        folders += listed.folders
        if not listed.more:
            return folders
        page += 1


def _is_listening(address: str) -> bool:
    """Return whether a process listens at an address; a socket's file outlives its process."""
    scheme, _, place = address.partition("://")
    try:
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_CONNECT_DEADLINE_S)
                probe.connect(place)
        else:
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_DEADLINE_S).close()
    except (OSError, ValueError):
        return False
    return True
