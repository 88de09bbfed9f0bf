"""Fixtures: a real cache store process and peers that speak for ranks."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cache_store.forked_store import ForkedStore
from tests.cache_store.running_store import Peer, RunningStore
from tests.unit.cache_store.harness import NAMESPACE

MakePeer = Callable[..., Peer]


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a temporary folder whose path is short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="ls-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store(home: Path) -> Iterator[RunningStore]:
    """Start a store process."""
    store = RunningStore(home)
    store.start()
    yield store
    store.close()


@pytest.fixture
def forked_store(home: Path) -> Iterator[ForkedStore]:
    """Return a store of 200 KB that starts within 20 ms; not started yet."""
    store = ForkedStore(home, CACHE_SSD_BYTES_MAX="200000")
    yield store
    store.close()


@pytest.fixture
def make_peer(store: RunningStore) -> Iterator[MakePeer]:
    """Connect peers to the store."""
    peers: list[Peer] = []

    def make(rank: int = 0, world_size: int = 1, namespace: str = NAMESPACE) -> Peer:
        peers.append(Peer(store, rank, world_size, namespace))
        peers[-1].connect()
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(make_peer: MakePeer) -> Peer:
    """Return the only rank of its world, connected."""
    return make_peer()
