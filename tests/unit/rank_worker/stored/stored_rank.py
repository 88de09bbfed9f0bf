"""A stored tier without MLX, on a scripted store: what tests hand to it and hear from it."""

import hashlib
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

from services.rank_worker.kv_cache.blocks.items import ItemKind, RestoredItem, SpillItem
from services.rank_worker.kv_cache.stored.context import TierSettings
from services.rank_worker.kv_cache.stored.record_files import Allocate
from services.rank_worker.kv_cache.stored.tier import StoredTier
from shared.block_record import HEADER_BYTES
from shared.messages import (
    AdoptedRestore,
    BlockPlace,
    BlocksRestored,
    BlocksSpilled,
    LocateBlocks,
    Message,
    ReleaseBlocks,
    RestoreBlocks,
    RestoreItem,
    SpillOrder,
)
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore, until

NAMESPACE = "00ff"
TOKENS = 16
MIB = 1024 * 1024


def block_hash(number: int) -> bytes:
    """Return the hash of a block of tests."""
    return hashlib.blake2b(f"block {number}".encode(), digest_size=32).digest()


def checkpoint_hash(number: int) -> bytes:
    """Return the hash of the checkpoint at the end of that block."""
    return hashlib.blake2b(f"checkpoint {number}".encode(), digest_size=32).digest()


def payload(name: bytes, size_bytes: int) -> bytes:
    """Return the bytes that belong to a hash, always the same."""
    return random.Random(name).randbytes(size_bytes)


def allocate(size_bytes: int) -> tuple[memoryview, memoryview]:
    """Stand for MLX: memory, to be filled and to be kept."""
    memory = bytearray(size_bytes)
    return memoryview(memory), memoryview(memory)


def spilled(name: bytes, size_bytes: int = 4_096, kind: ItemKind = "block") -> SpillItem:
    """Return one item of a spill."""
    tokens = TOKENS if kind == "block" else 5 * TOKENS
    return SpillItem(name, kind, tokens, memoryview(payload(name, size_bytes)))


_OPEN: list[StoredTier] = []


def close_all() -> None:
    """End the threads of all tiers that a test has made."""
    while _OPEN:
        _OPEN.pop().close()


class Rank:
    """The tier of rank 1 of 2 in epoch 3, and what it has told the scheduler."""

    def __init__(
        self,
        address: str,
        *,
        connects: bool = True,
        spill_bytes_max: int = 64 * MIB,
        staged_bytes_max: int = 64 * MIB,
        is_on: bool = True,
        allocate: Allocate = allocate,
    ) -> None:
        self.said: list[Message] = []
        self.reads = 0
        """Records for which memory was asked."""
        self.allocate = allocate

        def count(size_bytes: int) -> tuple[memoryview, Any]:
            self.reads += 1
            return self.allocate(size_bytes)

        settings = TierSettings(
            store_address=address,
            epoch=3,
            rank=1,
            world_size=2,
            spill_bytes_max=spill_bytes_max,
        )
        self.tier = StoredTier(settings, self.said.append, count, is_on=is_on)
        self.tier.expect(None, staged_bytes_max)
        self.tier.start()
        _OPEN.append(self.tier)
        self._restore_id = 0
        if is_on and connects:
            until(lambda: self.store_is != "away")

    @property
    def store_is(self) -> str:
        """Return what the tier believes of its store."""
        link = self.tier._link
        assert link is not None
        return link._store

    @property
    def sessions_lost(self) -> int:
        """Return how often the store was lost."""
        link = self.tier._link
        assert link is not None
        return link._restores._session

    @property
    def is_writing(self) -> bool:
        """Tell whether a file is being written."""
        link = self.tier._link
        assert link is not None
        return link._spills._writing is not None

    def spill(self, *items: SpillItem, evict_first: list[bytes] | None = None) -> None:
        """Order a spill of these."""
        hashes = [item.hash for item in items]
        order = SpillOrder(namespace=NAMESPACE, hashes=hashes, evict_first=evict_first or [])
        self.tier.spill(order, list(items))

    def store(self, numbers: range, size_bytes: int = 4_096) -> None:
        """Have blocks with these numbers stored, one order for all, and wait for it."""
        stored = len(self.stored)
        self.spill(*(spilled(block_hash(number), size_bytes) for number in numbers))
        until(lambda: len(self.stored) == stored + len(numbers))

    def order(
        self, items: list[RestoreItem], deadline_s: float = 30.0, namespace: str = NAMESPACE
    ) -> int:
        """Order a restore and return its id."""
        self._restore_id += 1
        order = RestoreBlocks(
            epoch=3,
            restore_id=self._restore_id,
            namespace=namespace,
            items=items,
            deadline_s=deadline_s,
        )
        self.tier.restore(order)
        return self._restore_id

    def answer(self, restore_id: int) -> BlocksRestored:
        """Wait for the answer to a restore and return it."""
        until(lambda: any(one.restore_id == restore_id for one in self.of(BlocksRestored)))
        answers = [one for one in self.of(BlocksRestored) if one.restore_id == restore_id]
        assert len(answers) == 1
        answer: BlocksRestored = answers[0]
        assert (answer.epoch, answer.rank) == (3, 1)
        return answer

    def restore(self, items: list[RestoreItem], deadline_s: float = 30.0) -> BlocksRestored:
        """Order a restore and return the answer."""
        return self.answer(self.order(items, deadline_s))

    def wait_for_read(self, restore_id: int, prefix: int) -> None:
        """Wait until so many first items of a restore that is not answered are there."""
        link = self.tier._link
        assert link is not None
        opened = link._restores._open
        until(lambda: restore_id in opened and opened[restore_id].prefix == prefix)

    def take(self, restore_id: int, count: int) -> list[RestoredItem]:
        """Adopt, as a plan does."""
        return self.tier.take(AdoptedRestore(restore_id=restore_id, count=count))

    def of(self, kind: type[Any]) -> list[Any]:
        """Return what was said of one kind."""
        return [one for one in list(self.said) if isinstance(one, kind)]

    @property
    def stored(self) -> list[bytes]:
        """Hashes that were reported as stored, in order."""
        return [one for report in self.of(BlocksSpilled) for one in report.stored]

    @property
    def lost(self) -> list[bytes]:
        """Hashes that were reported as lost, in order."""
        return [one for report in self.of(BlocksSpilled) for one in report.lost]

    def reports(self) -> Counter[bytes]:
        """Return how often each hash was reported."""
        return Counter(self.stored + self.lost)


def blocks(numbers: range) -> list[RestoreItem]:
    """Return items of plain blocks."""
    return [RestoreItem(block=block_hash(number), length=TOKENS) for number in numbers]


def partial_files(store: ScriptedStore) -> list[Path]:
    """Return the files that nobody has taken over."""
    return list(store.blocks.rglob("partial-*"))


class Fifo:
    """A file whose opening hangs, as on a disk that hangs, until it is let go."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "fifo"
        os.mkfifo(self._path)

    def release(self) -> bool:
        """Let go whoever waits in `open`; False when nobody does."""
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True


def hang(store: ScriptedStore, block: bytes) -> Fifo:
    """Put a file that hangs in the place of a block's."""
    fifo = Fifo(store.folder)
    store.places[block] = BlockPlace(name="fifo", offset=0, size_bytes=HEADER_BYTES + 4_096)
    return fifo


def check(items: list[RestoredItem], names: list[bytes], size_bytes: int = 4_096) -> None:
    """Check what was taken: these blocks, in this order, with their own bytes."""
    assert [item.hash for item in items] == names
    for item in items:
        assert bytes(item.payload) == payload(item.hash, size_bytes)


def all_released(store: ScriptedStore) -> None:
    """Check that every question to the store is unpinned again, once."""
    until(lambda: len(store.of(ReleaseBlocks)) == len(store.of(LocateBlocks)))
    assert store.pins == {}
