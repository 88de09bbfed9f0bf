"""SIGKILL during load, again and again: what is located is right or a miss, never wrong.

LOCKSTEP_TEST_KILLS sets how many times; CI runs a few.
"""

import os
import random
import threading

from shared.messages import QuarantineBlocks
from tests.cache_store.running_store import Peer, RunningStore, block_hash

KILLS = int(os.environ.get("LOCKSTEP_TEST_KILLS", "12"))
BLOCKS = 64
LIMIT_BYTES = 200_000
"""Room for about half of what is written, so that eviction runs too."""


class Load:
    """Two ranks that write, locate, read and quarantine blocks, by a seed."""

    def __init__(self, peers: list[Peer], seed: int) -> None:
        self._peers = peers
        self._chance = random.Random(seed)
        self.accepted = 0
        self.read = 0
        self.missed = 0

    def turn(self) -> None:
        """Do one thing with one peer."""
        peer = self._chance.choice(self._peers)
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


def test_kills_under_load(store_with_limit: RunningStore) -> None:
    """After every kill the store comes back, serves what it has, and keeps to its limit."""
    store = store_with_limit
    chance = random.Random(7)
    peers = [Peer(store, rank, 2) for rank in range(2)]
    load = Load(peers, seed=8)
    for _ in range(KILLS):
        store.start()
        for peer in peers:
            peer.folder = ""
            peer.connect()
        # In the middle of whatever the store is doing then.
        assert store.process is not None
        killer = threading.Timer(chance.uniform(0.05, 0.5), store.process.kill)
        killer.start()
        while store.is_alive:
            load.turn()
        killer.join()
    store.start()
    for peer in peers:
        peer.folder = ""
        peer.connect()
    hashes = [block_hash(number) for number in range(BLOCKS)]
    found = [peer.has(*hashes).count(True) for peer in peers]
    report = peers[0].report()
    files = [*store.directory.glob("*/rank-*/*"), *store.directory.glob("quarantine/*")]

    print(
        f"{KILLS} kills: {load.accepted} files taken over, {load.read} records read, "
        f"{load.missed} missed, {found} there at the end"
    )
    assert load.accepted > KILLS
    assert load.read > 10 * KILLS
    assert min(found) > 0
    assert report.bytes_used == sum(path.stat().st_size for path in files) <= LIMIT_BYTES
    for peer in peers:
        peer.close()
    assert store.stop() == 0
