"""SIGKILL of the store under load, 200 times: each located record is correct or a miss."""

import random
import threading

import pytest

from shared.messages import QuarantineBlocks
from tests.cache_store.forked_store import ForkedStore
from tests.cache_store.running_store import Peer
from tests.unit.cache_store.harness import block_hash

KILLS = 200
BLOCKS = 64
LIMIT_BYTES = 200_000
"""Room for about half of the written blocks, so that eviction runs too."""


class Load:
    """Two ranks that write, locate, read and quarantine blocks, chosen by a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.accepted = 0
        self.read = 0
        self.missed = 0

    def perform_operation(self, peers: list[Peer]) -> None:
        """Perform one random operation with one peer."""
        peer = self._rng.choice(peers)
        peer.poll()
        if not peer.folder:
            peer.poll(0.01)
            return
        first = self._rng.randrange(BLOCKS)
        hashes = [block_hash((first + n) % BLOCKS) for n in range(self._rng.randint(1, 8))]
        kind = self._rng.random()
        if kind < 0.4:
            answer = peer.commit(*hashes, size_bytes=self._rng.choice((64, 1_000, 5_000)))
            self.accepted += answer is not None and answer.accepted
        elif kind < 0.95:
            # `has` fails the test for wrong bytes.
            found = peer.has(*hashes)
            self.read += sum(found)
            self.missed += len(found) - sum(found)
        elif peer.is_connected:
            peer.send(QuarantineBlocks(hashes=hashes[:1], cause="damaged: by the test"))


def _connect_peers(store: ForkedStore) -> list[Peer]:
    # New peers, as ranks of a new epoch: a reconnect would wait for half a second.
    peers = [Peer(store, rank, 2) for rank in range(2)]
    for peer in peers:
        peer.connect()
    return peers


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_cache_store_serves_no_wrong_bytes_after_200_kills_under_load(
    forked_store: ForkedStore,
) -> None:
    """After each kill the store starts, serves correct records and keeps to its limit."""
    store = forked_store
    rng = random.Random(7)
    load = Load(seed=8)
    for _ in range(KILLS):
        store.start()
        peers = _connect_peers(store)
        # The kill interrupts an arbitrary operation of the store.
        killer = threading.Timer(rng.uniform(0.0, 0.15), store.kill)
        killer.start()
        while store.is_alive:
            load.perform_operation(peers)
        killer.join()
        for peer in peers:
            peer.close()
    store.start()
    peers = _connect_peers(store)
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
