"""A rank's stored tier without MLX, connected to a scripted store."""

import hashlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.rank_worker.kv_cache.blocks.items import CachedItem, ItemKind, SpillItem
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
from tests.support.waiting import wait_until
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore

NAMESPACE = "00ff"
TOKENS = 16
MIB = 1024 * 1024


def block_hash(number: int) -> bytes:
    """Return the hash of block `number`."""
    return hashlib.blake2b(f"block {number}".encode(), digest_size=32).digest()


def checkpoint_hash(number: int) -> bytes:
    """Return the hash of the checkpoint at the end of block `number`."""
    return hashlib.blake2b(f"checkpoint {number}".encode(), digest_size=32).digest()


def payload(name: bytes, size_bytes: int) -> bytes:
    """Return the payload of a hash; always the same bytes."""
    return random.Random(name).randbytes(size_bytes)


def allocate(size_bytes: int) -> tuple[memoryview, memoryview]:
    """Allocate memory in place of MLX; return it as the view to fill and as the array."""
    memory = bytearray(size_bytes)
    return memoryview(memory), memoryview(memory)


def spill_item(name: bytes, size_bytes: int = 4_096, kind: ItemKind = "block") -> SpillItem:
    """Return one item to spill."""
    tokens = TOKENS if kind == "block" else 5 * TOKENS
    return SpillItem(name, kind, tokens, memoryview(payload(name, size_bytes)))


_OPEN: list[StoredTier] = []


def close_all_tiers() -> None:
    """Stop the threads of all tiers that a test created."""
    while _OPEN:
        _OPEN.pop().close()


@contextmanager
def scripted_store(folder: Path) -> Iterator[ScriptedStore]:
    """Start a scripted store; at the exit close all tiers of the test before it."""
    store = ScriptedStore(folder)
    store.start()
    yield store
    close_all_tiers()
    store.close()


class Rank:
    """The stored tier of rank 1 of 2 in epoch 3, and the messages it sent to the scheduler."""

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
        self.messages: list[Message] = []
        self.reads = 0
        """Number of records for which memory was allocated."""
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
        self.tier = StoredTier(settings, self.messages.append, count, is_on=is_on)
        self.tier.expect(None, staged_bytes_max)
        self.tier.start()
        _OPEN.append(self.tier)
        self._restore_id = 0
        if is_on and connects:
            wait_until(lambda: self.store_state != "away")

    @property
    def store_state(self) -> str:
        """Whether the tier's store is `away`, `off` or `on`."""
        return self.tier._store

    @property
    def sessions_lost(self) -> int:
        """How often the link to the store was lost."""
        return self.tier._restores._session

    @property
    def is_writing(self) -> bool:
        """Whether a spill file is being written."""
        return self.tier._spills._writing is not None

    def spill(self, *items: SpillItem, evict_first: list[bytes] | None = None) -> None:
        """Order a spill of these items."""
        hashes = [item.hash for item in items]
        order = SpillOrder(namespace=NAMESPACE, hashes=hashes, evict_first=evict_first or [])
        self.tier.spill(order, list(items))

    def store(self, numbers: range, size_bytes: int = 4_096) -> None:
        """Spill blocks with these numbers in one order and wait until they are stored."""
        stored = len(self.stored)
        self.spill(*(spill_item(block_hash(number), size_bytes) for number in numbers))
        wait_until(lambda: len(self.stored) == stored + len(numbers))

    def start_restore(
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

    def wait_for_answer(self, restore_id: int) -> BlocksRestored:
        """Wait for the only answer to a restore and return it."""
        wait_until(
            lambda: any(one.restore_id == restore_id for one in self.messages_of(BlocksRestored))
        )
        answers = [one for one in self.messages_of(BlocksRestored) if one.restore_id == restore_id]
        assert len(answers) == 1
        answer: BlocksRestored = answers[0]
        assert (answer.epoch, answer.rank) == (3, 1)
        return answer

    def restore(self, items: list[RestoreItem], deadline_s: float = 30.0) -> BlocksRestored:
        """Order a restore and return its answer."""
        return self.wait_for_answer(self.start_restore(items, deadline_s))

    def wait_for_read(self, restore_id: int, prefix: int) -> None:
        """Wait until the first `prefix` items of an open restore are read."""
        opened = self.tier._restores._open
        wait_until(lambda: restore_id in opened and opened[restore_id].prefix == prefix)

    def adopt(self, restore_id: int, count: int) -> list[CachedItem]:
        """Adopt the first `count` items of a restore, as a step plan does."""
        return self.tier.take(AdoptedRestore(restore_id=restore_id, count=count))

    def messages_of(self, kind: type[Any]) -> list[Any]:
        """Return all sent messages of one type."""
        return [one for one in list(self.messages) if isinstance(one, kind)]

    @property
    def stored(self) -> list[bytes]:
        """Hashes reported as stored, in order."""
        return [one for report in self.messages_of(BlocksSpilled) for one in report.stored]

    @property
    def lost(self) -> list[bytes]:
        """Hashes reported as lost, in order."""
        return [one for report in self.messages_of(BlocksSpilled) for one in report.lost]

    def report_counts(self) -> Counter[bytes]:
        """Return how often each hash was reported."""
        return Counter(self.stored + self.lost)


def restore_items(numbers: range) -> list[RestoreItem]:
    """Return restore items of plain blocks."""
    return [RestoreItem(block=block_hash(number), length=TOKENS) for number in numbers]


def partial_files(store: ScriptedStore) -> list[Path]:
    """Return all files that the store has not taken over."""
    return list(store.blocks.rglob("partial-*"))


class HangingFile:
    """A file that blocks in `open`, as on a hanging disk, until it is released."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "hanging"
        os.mkfifo(self._path)

    def release(self) -> bool:
        """Release all threads that wait in `open`; return whether any did."""
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True


def hang_reads_of(store: ScriptedStore, block: bytes) -> HangingFile:
    """Replace a block's file by one that hangs."""
    hanging_file = HangingFile(store.folder)
    store.places[block] = BlockPlace(name="hanging", offset=0, size_bytes=HEADER_BYTES + 4_096)
    return hanging_file


def check_items(items: list[CachedItem], names: list[bytes], size_bytes: int = 4_096) -> None:
    """Check that these are the blocks, in order, each with its own payload."""
    assert [item.hash for item in items] == names
    for item in items:
        assert bytes(item.payload) == payload(item.hash, size_bytes)


def check_all_released(store: ScriptedStore) -> None:
    """Check that each locate query is released exactly once."""
    wait_until(
        lambda: len(store.messages_of(ReleaseBlocks)) == len(store.messages_of(LocateBlocks))
    )
    assert store.pins == {}
