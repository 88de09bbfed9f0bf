"""The stored tier with a real cache store process that is killed."""

import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.messages import BlocksSpilled
from tests.cache_store.running_store import RunningStore
from tests.support.waiting import wait_until
from tests.unit.rank_worker.stored.stored_rank import (
    Rank,
    block_hash,
    check_items,
    close_all_tiers,
    restore_items,
    spill_item,
)

LONG_S = 60.0


@pytest.fixture
def store() -> Iterator[RunningStore]:
    """Start a real store in a folder whose path is short enough for a Unix socket."""
    home = Path(tempfile.mkdtemp(prefix="ls-"))
    made = RunningStore(home)
    made.start()
    yield made
    close_all_tiers()
    made.close()
    shutil.rmtree(home, ignore_errors=True)


def _connect_rank(store: RunningStore) -> Rank:
    """Connect a tier and wait until its store is on."""
    rank = Rank(store.address)
    number = 1_000_000

    def is_on() -> bool:
        nonlocal number
        number += 1
        before = len(rank.report_counts())
        rank.spill(spill_item(block_hash(number)))
        wait_until(lambda: len(rank.report_counts()) > before, LONG_S)
        return bool(rank.stored)

    wait_until(is_on, LONG_S)
    rank.messages.clear()
    return rank


def test_blocks_are_restored_after_store_and_rank_restart(store: RunningStore) -> None:
    """Blocks that one tier spilled are restored by another tier from the restarted store."""
    rank = _connect_rank(store)
    rank.store(range(20), 100_000)
    assert rank.messages_of(BlocksSpilled)[-1].store_bytes > 2_000_000
    store.kill()
    store.start()
    other = _connect_rank(store)
    answer = other.restore(restore_items(range(20)))

    assert (answer.count, answer.stopped_by) == (20, "")
    check_items(
        other.adopt(answer.restore_id, 20), [block_hash(number) for number in range(20)], 100_000
    )


def test_block_with_damaged_record_is_quarantined_and_can_be_stored_again(
    store: RunningStore,
) -> None:
    """Rank and store treat a damaged record as absent; the block can be stored again."""
    rank = _connect_rank(store)
    rank.store(range(3), 5_000)
    for path in store.directory.rglob("*.blocks"):
        data = bytearray(path.read_bytes())
        data[-10] ^= 1
        path.write_bytes(data)
    assert rank.restore(restore_items(range(3))).count == 2
    wait_until(lambda: rank.restore(restore_items(range(2, 3))).stopped_by == "absent", LONG_S)
    rank.spill(spill_item(block_hash(2), 5_000))
    wait_until(lambda: rank.stored.count(block_hash(2)) == 2, LONG_S)

    assert rank.restore(restore_items(range(2, 3))).count == 1


@pytest.mark.proof
def test_killed_store_loses_no_stored_block(store: RunningStore) -> None:
    """Each hash is reported once, each restore is answered once, and stored blocks are correct.

    A killed store loses no file that it has taken over, so each stored block must be located.
    """
    rng = random.Random(5)
    rank = _connect_rank(store)
    pause = threading.Event()
    number = 0
    restore_ids = []
    for kills in range(5):
        wait_until(lambda: rank.sessions_lost == kills, LONG_S)  # noqa: B023 - called here
        wait_until(lambda: rank.store_state == "on", LONG_S)
        for step in range(20):
            if step == 15:
                store.kill()
            count = rng.randint(1, 6)
            rank.spill(*(spill_item(block_hash(number + n), 20_000) for n in range(count)))
            number += count
            first = rng.randrange(number)
            restore_ids.append(
                rank.start_restore(restore_items(range(first, min(first + 4, number))), LONG_S)
            )
            pause.wait(rng.random() * 0.02)
        store.start()
    wait_until(lambda: len(rank.report_counts()) == number, LONG_S)
    for restore_id in restore_ids:
        answer = rank.wait_for_answer(restore_id)
        for item in rank.adopt(restore_id, answer.count):
            check_items([item], [item.hash], 20_000)

    assert set(rank.report_counts().values()) == {1}
    assert rank.stored
    last = _connect_rank(store)
    for one in range(number):
        if block_hash(one) in rank.stored:
            answer = last.restore(restore_items(range(one, one + 1)))
            assert (answer.count, answer.stopped_by) == (1, "")
            check_items(last.adopt(answer.restore_id, 1), [block_hash(one)], 20_000)
