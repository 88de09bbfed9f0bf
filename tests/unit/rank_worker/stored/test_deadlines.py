"""Restores while disk or store hang, die or are off: answered at the deadline at the latest."""

import threading
from pathlib import Path
from typing import Any

import pytest

from services.rank_worker.kv_cache.stored import disk_threads, restore_task
from shared.messages import (
    BlocksRestored,
    LocateBlocks,
    ReleaseBlocks,
)
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore, until
from tests.unit.rank_worker.stored.stored_rank import (
    MIB,
    Rank,
    all_released,
    block_hash,
    blocks,
    check,
    hang,
    spilled,
)


def test_a_read_that_hangs_is_answered_at_the_deadline(store: ScriptedStore, rank: Rank) -> None:
    """With what was read before it; the pins stay until the read has ended, then they go."""
    fifo = hang(store, block_hash(3))
    answer = rank.restore(blocks(range(8)), deadline_s=2.0)

    assert (answer.count, answer.stopped_by) == (3, "late")
    assert answer.read_ms >= 2_000.0
    check(rank.take(answer.restore_id, 3), [block_hash(number) for number in range(3)])
    assert len(store.pins) == 1
    until(lambda: fifo.release() or store.pins == {})
    all_released(store)
    assert len(rank.of(BlocksRestored)) == 1


def test_one_read_that_hangs_holds_up_no_other_restore(store: ScriptedStore, rank: Rank) -> None:
    """Another restore of other files is read meanwhile."""
    fifo = hang(store, block_hash(3))
    hanging = rank.order(blocks(range(3, 4)), deadline_s=60.0)
    answer = rank.restore(blocks(range(3)))
    until(fifo.release)

    assert (answer.count, answer.stopped_by) == (3, "")
    assert rank.answer(hanging).count == 0


def test_reads_that_hang_hold_up_no_spill(store: ScriptedStore, rank: Rank) -> None:
    """With every reading thread stuck, blocks are still written and restores answered."""
    fifo = hang(store, block_hash(3))
    hanging = [rank.order(blocks(range(3, 4)), deadline_s=0.2) for _ in range(4)]
    answers = [rank.answer(one) for one in hanging]
    rank.store(range(20, 24))

    assert [(one.count, one.stopped_by) for one in answers] == [(0, "late")] * 4

    def all_let_go() -> bool:
        fifo.release()
        return store.pins == {}

    until(all_let_go)


def test_a_store_that_does_not_answer_is_late(store: ScriptedStore, rank: Rank) -> None:
    """The deadline holds for the store as for the disk; its late answer is unpinned."""
    store.is_mute = True
    answer = rank.restore(blocks(range(8)), deadline_s=0.2)

    assert (answer.count, answer.stopped_by) == (0, "late")


def test_a_late_answer_of_the_store_is_unpinned(store: ScriptedStore, rank: Rank) -> None:
    """A restore that is over when the store answers reads nothing and leaves no pin."""
    store.is_mute = True
    late = rank.order(blocks(range(8)), deadline_s=0.1)
    until(lambda: len(store.of(LocateBlocks)) == 1)
    assert rank.answer(late).count == 0
    store.is_mute = False
    store.answer_again(store.of(LocateBlocks)[0])
    all_released(store)

    assert rank.reads == 0


def test_what_is_read_after_the_answer_is_discarded(store: ScriptedStore, rank: Rank) -> None:
    """The read under way is the last one, and what it brings is held by nobody."""
    slow, go = rank.allocate, threading.Event()

    def hang_at_fourth(size_bytes: int) -> tuple[memoryview, Any]:
        if rank.reads == 4:
            go.wait(10.0)
        return slow(size_bytes)

    rank.allocate = hang_at_fourth
    answer = rank.restore(blocks(range(8)), deadline_s=2.0)
    staged = rank.tier._staging._staged[answer.restore_id].restore
    go.set()
    all_released(store)

    assert (answer.count, answer.stopped_by) == (3, "late")
    assert len(staged._records) == 3
    assert rank.reads == 4


def test_what_lies_behind_a_hung_read_is_not_held(
    store: ScriptedStore, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads have read further; what cannot be adopted takes no memory."""
    monkeypatch.setattr(restore_task, "CLAIM_BYTES", 4_096)
    monkeypatch.setattr(disk_threads, "CLAIM_BYTES", 4_096)
    fifo = hang(store, block_hash(3))
    hanging = rank.order(blocks(range(8)), deadline_s=3.0)
    until(lambda: rank.reads == 7)
    answer = rank.answer(hanging)
    staged = rank.tier._staging._staged[hanging].restore
    fifo.release()

    assert (answer.count, answer.stopped_by) == (3, "late")
    assert sorted(staged._records) == [0, 1, 2]


def test_without_a_store_the_answer_is_off(tmp_path: Path) -> None:
    """Nobody listens: answered at once, not at the deadline."""
    rank = Rank(ScriptedStore(tmp_path).address, connects=False)
    answer = rank.restore(blocks(range(8)), deadline_s=1_000.0)

    assert (answer.count, answer.stopped_by) == (0, "off")


def test_a_tier_that_is_off_answers_off(store: ScriptedStore) -> None:
    """With the setting off no store is asked."""
    rank = Rank(store.address, is_on=False)

    assert rank.restore(blocks(range(8))).stopped_by == "off"
    assert store.heard == []


def test_a_store_that_is_off_answers_off(store: ScriptedStore, rank: Rank) -> None:
    """Switched off, also while a restore is read, and found again when it is on."""
    fifo = hang(store, block_hash(3))
    hanging = rank.order(blocks(range(8)), deadline_s=1_000.0)
    rank.wait_for_read(hanging, 3)
    store.switch(off=True)

    answer = rank.answer(hanging)
    assert answer.stopped_by == "off"
    assert rank.restore(blocks(range(8))).stopped_by == "off"
    fifo.release()
    store.switch(off=False)
    until(lambda: rank.store_is == "on")
    assert rank.restore(blocks(range(3))).count == 3


@pytest.mark.parametrize("with_goodbye", [True, False])
def test_a_store_killed_during_a_restore_is_off_until_it_is_back(
    store: ScriptedStore, rank: Rank, *, with_goodbye: bool
) -> None:
    """What was read counts; the next store is asked again, and not for what is over."""
    fifo = hang(store, block_hash(3))
    hanging = rank.order(blocks(range(8)), deadline_s=1_000.0)
    rank.wait_for_read(hanging, 3)
    store.kill(with_goodbye=with_goodbye)
    store.start()
    answer = rank.answer(hanging)
    until(lambda: rank.store_is == "on")
    fifo.release()

    assert (answer.count, answer.stopped_by) == (3, "off")
    check(rank.take(hanging, 3), [block_hash(number) for number in range(3)])
    assert rank.restore(blocks(range(3))).count == 3
    until(lambda: store.pins == {})
    assert len(store.of(LocateBlocks)) == len(store.of(ReleaseBlocks)) + 1


def test_a_store_killed_before_it_locates_is_off_until_it_is_back(
    store: ScriptedStore, rank: Rank
) -> None:
    """Nobody will answer what was asked: over at once, and the next store pins nothing for it."""
    store.is_mute = True
    restore_id = rank.order(blocks(range(8)))
    until(lambda: len(store.of(LocateBlocks)) == 1)
    store.kill()
    store.is_mute = False
    store.start()
    answer = rank.answer(restore_id)
    assert (answer.count, answer.stopped_by) == (0, "off")
    until(lambda: rank.store_is == "on")
    again = rank.restore(blocks(range(8)))

    assert (again.count, again.stopped_by) == (8, "")
    assert [len(located.hashes) for located in store.of(LocateBlocks)] == [8, 8]
    until(lambda: store.pins == {})


def test_forgetting_one_that_is_being_read_answers_it(store: ScriptedStore, rank: Rank) -> None:
    """Nobody wants it any more: it is answered with nothing, once, and its memory is free."""
    fifo = hang(store, block_hash(3))
    hanging = rank.order(blocks(range(8)), deadline_s=1_000.0)
    rank.wait_for_read(hanging, 3)
    rank.take(hanging, 0)
    answer = rank.answer(hanging)
    fifo.release()

    assert (answer.count, answer.stopped_by) == (0, "late")
    assert rank.tier._staging.size_bytes == 0
    all_released(store)


def test_restores_go_before_spills(store: ScriptedStore) -> None:
    """While a restore is read nothing is written, until the queue is half full."""
    rank = Rank(store.address, spill_bytes_max=MIB)
    rank.store(range(4))
    fifo = hang(store, block_hash(3))
    hanging = rank.order(blocks(range(4)), deadline_s=1_000.0)
    until(lambda: len(store.pins) == 1)
    rank.spill(spilled(block_hash(10), 300_000))
    threading.Event().wait(0.1)
    waits = block_hash(10) not in rank.stored
    rank.spill(spilled(block_hash(11), 300_000))
    until(lambda: block_hash(10) in rank.stored)
    until(fifo.release)
    rank.answer(hanging)
    until(lambda: block_hash(11) in rank.stored)

    assert waits
