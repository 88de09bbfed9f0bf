"""A store process and peers, each on folders of their own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cache_store.forked_store import ForkedStore
from tests.cache_store.running_store import NAMESPACE, Peer, RunningStore

MakePeer = Callable[..., Peer]


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="ls-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store(home: Path) -> Iterator[RunningStore]:
    """A store that is started."""
    store = RunningStore(home)
    store.start()
    yield store
    store.close()


@pytest.fixture
def forked_store(home: Path) -> Iterator[ForkedStore]:
    """A store with little room, whose processes start at once; not started."""
    store = ForkedStore(home, CACHE_SSD_BYTES_MAX="200000")
    yield store
    store.close()


@pytest.fixture
def make_peer(store: RunningStore) -> Iterator[MakePeer]:
    """Connect peers to the store."""
    made: list[Peer] = []

    def make(rank: int = 0, world_size: int = 1, namespace: str = NAMESPACE) -> Peer:
        made.append(Peer(store, rank, world_size, namespace))
        made[-1].connect()
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def peer(make_peer: MakePeer) -> Peer:
    """The only rank of its world, connected."""
    return make_peer()
