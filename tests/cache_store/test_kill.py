"""SIGKILL during load, 200 times: what is located is right or a miss, never wrong."""

import random
import threading

import pytest

from shared.messages import QuarantineBlocks
from tests.cache_store.forked_store import ForkedStore
from tests.cache_store.running_store import Peer, block_hash

KILLS = 200
BLOCKS = 64
LIMIT_BYTES = 200_000
"""Room for about half of what is written, so that eviction runs too."""


class Load:
    """Two ranks that write, locate, read and quarantine blocks, by a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.accepted = 0
        self.read = 0
        self.missed = 0

    def turn(self, peers: list[Peer]) -> None:
        """Do one thing with one peer."""
        peer = self._chance.choice(peers)
        peer.poll()
        if not peer.folder:
            peer.poll(0.01)
            return
        first = self._chance.randrange(BLOCKS)
        hashes = [block_hash((first + n) % BLOCKS) for n in range(self._chance.randint(1, 8))]
        kind = self._chance.random()
        if kind < 0.4:
            answer = peer.commit(*hashes, size_bytes=self._chance.choice((64, 1_000, 5_000)))
            self.accepted += answer is not None and answer.accepted
        elif kind < 0.95:
            # Wrong bytes end the test here.
            found = peer.has(*hashes)
            self.read += sum(found)
            self.missed += len(found) - sum(found)
        elif peer.is_connected:
            peer.say(QuarantineBlocks(hashes=hashes[:1], cause="damaged: by the test"))


def _connected(store: ForkedStore) -> list[Peer]:
    # New ones each time, as ranks of a new epoch: who reconnects waits for half a second.
    peers = [Peer(store, rank, 2) for rank in range(2)]
    for peer in peers:
        peer.connect()
    return peers


@pytest.mark.timeout(600)
def test_kills_under_load(forked_store: ForkedStore) -> None:
    """After every kill the store comes back, serves what it has, and keeps to its limit."""
    store = forked_store
    chance = random.Random(7)
    load = Load(seed=8)
    for _ in range(KILLS):
        store.start()
        peers = _connected(store)
        # In the middle of whatever the store is doing then.
        killer = threading.Timer(chance.uniform(0.0, 0.15), store.kill)
        killer.start()
        while store.is_alive:
            load.turn(peers)
        killer.join()
        for peer in peers:
            peer.close()
    store.start()
    peers = _connected(store)
    hashes = [block_hash(number) for number in range(BLOCKS)]
    found = [peer.has(*hashes).count(True) for peer in peers]
    report = peers[0].report()
    files = [*store.directory.glob("*/rank-*/*"), *store.directory.glob("quarantine/*")]

    print(
        f"{KILLS} kills: {load.accepted} files taken over, {load.read} records read, "
        f"{load.missed} missed, {found} there at the end"
    )
    assert load.accepted > KILLS
    assert load.read > KILLS
    assert min(found) > 0
    assert report.bytes_used == sum(path.stat().st_size for path in files) <= LIMIT_BYTES
    for peer in peers:
        peer.close()
    assert store.stop() == 0
