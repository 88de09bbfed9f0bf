"""The stored tier on a real cache store process, which is killed."""

import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.messages import BlocksSpilled
from tests.cache_store.running_store import RunningStore
from tests.unit.rank_worker.stored.scripted_store import until
from tests.unit.rank_worker.stored.stored_rank import (
    Rank,
    block_hash,
    blocks,
    check,
    close_all,
    spilled,
)

LONG_S = 60.0


@pytest.fixture
def store() -> Iterator[RunningStore]:
    """A store that is started, in a folder whose path is short enough for a socket."""
    home = Path(tempfile.mkdtemp(prefix="ls-"))
    made = RunningStore(home)
    made.start()
    yield made
    close_all()
    made.close()
    shutil.rmtree(home, ignore_errors=True)


def _rank(store: RunningStore) -> Rank:
    """Connect a tier, and wait until its store is on."""
    rank = Rank(store.address)
    number = 1_000_000

    def is_on() -> bool:
        nonlocal number
        number += 1
        before = len(rank.reports())
        rank.spill(spilled(block_hash(number)))
        until(lambda: len(rank.reports()) > before, LONG_S)
        return bool(rank.stored)

    until(is_on, LONG_S)
    rank.said.clear()
    return rank


def test_blocks_are_found_again_after_both_were_killed(store: RunningStore) -> None:
    """What one tier spilled, another one restores from the next store, byte for byte."""
    rank = _rank(store)
    rank.store(range(20), 100_000)
    assert rank.of(BlocksSpilled)[-1].store_bytes > 2_000_000
    store.kill()
    store.start()
    other = _rank(store)
    answer = other.restore(blocks(range(20)))

    assert (answer.count, answer.stopped_by) == (20, "")
    check(other.take(answer.restore_id, 20), [block_hash(number) for number in range(20)], 100_000)


def test_a_record_that_changed_on_disk_is_quarantined_and_written_anew(
    store: RunningStore,
) -> None:
    """Two real processes agree on what is unreadable; afterwards the block can be stored again."""
    rank = _rank(store)
    rank.store(range(3), 5_000)
    for path in store.directory.rglob("*.blocks"):
        data = bytearray(path.read_bytes())
        data[-10] ^= 1
        path.write_bytes(data)
    assert rank.restore(blocks(range(3))).count == 2
    until(lambda: rank.restore(blocks(range(2, 3))).stopped_by == "absent", LONG_S)
    rank.spill(spilled(block_hash(2), 5_000))
    until(lambda: rank.stored.count(block_hash(2)) == 2, LONG_S)

    assert rank.restore(blocks(range(2, 3))).count == 1


@pytest.mark.proof
def test_kills_under_load_lose_spills_and_nothing_else(store: RunningStore) -> None:
    """Each hash is reported once, each restore answered once; what is stored is found, and right.

    A killed process loses no file that it has taken over, so every stored block must be there.
    """
    draw = random.Random(5)
    rank = _rank(store)
    pause = threading.Event()
    number = 0
    orders = []
    for kills in range(5):
        until(lambda: rank.sessions_lost == kills, LONG_S)  # noqa: B023 - called here
        until(lambda: rank.store_is == "on", LONG_S)
        for step in range(20):
            if step == 15:
                store.kill()
            count = draw.randint(1, 6)
            rank.spill(*(spilled(block_hash(number + n), 20_000) for n in range(count)))
            number += count
            first = draw.randrange(number)
            orders.append(rank.order(blocks(range(first, min(first + 4, number))), LONG_S))
            pause.wait(draw.random() * 0.02)
        store.start()
    until(lambda: len(rank.reports()) == number, LONG_S)
    for order in orders:
        answer = rank.answer(order)
        for item in rank.take(order, answer.count):
            check([item], [item.hash], 20_000)

    assert set(rank.reports().values()) == {1}
    assert rank.stored
    last = _rank(store)
    for one in range(number):
        if block_hash(one) in rank.stored:
            answer = last.restore(blocks(range(one, one + 1)))
            assert (answer.count, answer.stopped_by) == (1, "")
            check(last.take(answer.restore_id, 1), [block_hash(one)], 20_000)
