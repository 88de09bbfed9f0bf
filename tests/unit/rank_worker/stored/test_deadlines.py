"""Restores with a hanging disk or a store that hangs, dies or is off."""

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
from tests.support.waiting import wait_until
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore
from tests.unit.rank_worker.stored.stored_rank import (
    MIB,
    Rank,
    block_hash,
    check_all_released,
    check_items,
    hang_reads_of,
    restore_items,
    spill_item,
)


def test_restore_with_hanging_read_is_answered_at_deadline(
    store: ScriptedStore, rank: Rank
) -> None:
    """The answer counts the items read before; pins are released when the read has ended."""
    hanging_file = hang_reads_of(store, block_hash(3))
    answer = rank.restore(restore_items(range(8)), deadline_s=2.0)

    assert (answer.count, answer.stopped_by) == (3, "late")
    assert answer.read_ms >= 2_000.0
    check_items(rank.adopt(answer.restore_id, 3), [block_hash(number) for number in range(3)])
    assert len(store.pins) == 1
    wait_until(lambda: hanging_file.release() or store.pins == {})
    check_all_released(store)
    assert len(rank.messages_of(BlocksRestored)) == 1


def test_hanging_read_does_not_delay_restore_of_other_files(
    store: ScriptedStore, rank: Rank
) -> None:
    """Another restore of other files is read while one read hangs."""
    hanging_file = hang_reads_of(store, block_hash(3))
    hanging_id = rank.start_restore(restore_items(range(3, 4)), deadline_s=60.0)
    answer = rank.restore(restore_items(range(3)))
    wait_until(hanging_file.release)

    assert (answer.count, answer.stopped_by) == (3, "")
    assert rank.wait_for_answer(hanging_id).count == 0


def test_blocks_are_spilled_while_all_reading_threads_hang(
    store: ScriptedStore, rank: Rank
) -> None:
    """While all reading threads hang, blocks are still spilled and restores answered."""
    hanging_file = hang_reads_of(store, block_hash(3))
    hanging_ids = [rank.start_restore(restore_items(range(3, 4)), deadline_s=0.2) for _ in range(4)]
    answers = [rank.wait_for_answer(one) for one in hanging_ids]
    rank.store(range(20, 24))

    assert [(one.count, one.stopped_by) for one in answers] == [(0, "late")] * 4

    def all_pins_released() -> bool:
        hanging_file.release()
        return store.pins == {}

    wait_until(all_pins_released)


def test_restore_without_answer_of_store_stops_at_deadline_with_cause_late(
    store: ScriptedStore, rank: Rank
) -> None:
    """The deadline also applies to the store's answer."""
    store.is_mute = True
    answer = rank.restore(restore_items(range(8)), deadline_s=0.2)

    assert (answer.count, answer.stopped_by) == (0, "late")


def test_block_locations_arriving_after_restore_ended_are_released_without_reading(
    store: ScriptedStore, rank: Rank
) -> None:
    """When the store locates blocks after the restore has ended, nothing is read and the pins are
    released.
    """
    store.is_mute = True
    late = rank.start_restore(restore_items(range(8)), deadline_s=0.1)
    wait_until(lambda: len(store.messages_of(LocateBlocks)) == 1)
    assert rank.wait_for_answer(late).count == 0
    store.is_mute = False
    store.answer_again(store.messages_of(LocateBlocks)[0])
    check_all_released(store)

    assert rank.reads == 0


def test_item_read_after_restore_deadline_is_discarded(store: ScriptedStore, rank: Rank) -> None:
    """The read in progress at the deadline is the last one, and its item is not staged."""
    allocate, go_on = rank.allocate, threading.Event()

    def hang_at_fourth(size_bytes: int) -> tuple[memoryview, Any]:
        if rank.reads == 4:
            go_on.wait(10.0)
        return allocate(size_bytes)

    rank.allocate = hang_at_fourth
    answer = rank.restore(restore_items(range(8)), deadline_s=2.0)
    staged = rank.tier._staging._staged[answer.restore_id]
    go_on.set()
    check_all_released(store)

    assert (answer.count, answer.stopped_by) == (3, "late")
    assert len(staged._records) == 3
    assert rank.reads == 4


def test_items_read_beyond_hanging_item_are_freed(
    store: ScriptedStore, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that other threads read beyond the hanging one are freed."""
    monkeypatch.setattr(restore_task, "CLAIM_BYTES", 4_096)
    monkeypatch.setattr(disk_threads, "CLAIM_BYTES", 4_096)
    hanging_file = hang_reads_of(store, block_hash(3))
    hanging_id = rank.start_restore(restore_items(range(8)), deadline_s=3.0)
    wait_until(lambda: rank.reads == 7)
    answer = rank.wait_for_answer(hanging_id)
    staged = rank.tier._staging._staged[hanging_id]
    hanging_file.release()

    assert (answer.count, answer.stopped_by) == (3, "late")
    assert sorted(staged._records) == [0, 1, 2]


def test_restore_without_store_process_returns_cause_off_before_its_deadline(
    tmp_path: Path,
) -> None:
    """Without a store process the restore is answered at once, not at its deadline."""
    rank = Rank(ScriptedStore(tmp_path).address, connects=False)
    answer = rank.restore(restore_items(range(8)), deadline_s=1_000.0)

    assert (answer.count, answer.stopped_by) == (0, "off")


def test_restore_with_ssd_cache_off_returns_cause_off_without_asking_store(
    store: ScriptedStore,
) -> None:
    """With the SSD cache off a restore sends nothing to the store and returns the cause `off`."""
    rank = Rank(store.address, is_on=False)

    assert rank.restore(restore_items(range(8))).stopped_by == "off"
    assert store.messages == []


def test_restores_return_cause_off_while_store_is_switched_off(
    store: ScriptedStore, rank: Rank
) -> None:
    """Open and new restores return the cause `off` when the store switches off, until it is on
    again.
    """
    hanging_file = hang_reads_of(store, block_hash(3))
    hanging_id = rank.start_restore(restore_items(range(8)), deadline_s=1_000.0)
    rank.wait_for_read(hanging_id, 3)
    store.switch(off=True)

    answer = rank.wait_for_answer(hanging_id)
    assert answer.stopped_by == "off"
    assert rank.restore(restore_items(range(8))).stopped_by == "off"
    hanging_file.release()
    store.switch(off=False)
    wait_until(lambda: rank.store_state == "on")
    assert rank.restore(restore_items(range(3))).count == 3


@pytest.mark.parametrize("with_goodbye", [True, False])
def test_items_read_before_store_was_killed_are_adopted(
    store: ScriptedStore, rank: Rank, *, with_goodbye: bool
) -> None:
    """Items read before the kill are adopted; the next store gets new queries only."""
    hanging_file = hang_reads_of(store, block_hash(3))
    hanging_id = rank.start_restore(restore_items(range(8)), deadline_s=1_000.0)
    rank.wait_for_read(hanging_id, 3)
    store.kill(with_goodbye=with_goodbye)
    store.start()
    answer = rank.wait_for_answer(hanging_id)
    wait_until(lambda: rank.store_state == "on")
    hanging_file.release()

    assert (answer.count, answer.stopped_by) == (3, "off")
    check_items(rank.adopt(hanging_id, 3), [block_hash(number) for number in range(3)])
    assert rank.restore(restore_items(range(3))).count == 3
    wait_until(lambda: store.pins == {})
    assert len(store.messages_of(LocateBlocks)) == len(store.messages_of(ReleaseBlocks)) + 1


def test_open_restore_is_answered_at_once_when_store_is_killed(
    store: ScriptedStore, rank: Rank
) -> None:
    """The open restore is answered at once, and the next store pins nothing for it."""
    store.is_mute = True
    restore_id = rank.start_restore(restore_items(range(8)))
    wait_until(lambda: len(store.messages_of(LocateBlocks)) == 1)
    store.kill()
    store.is_mute = False
    store.start()
    answer = rank.wait_for_answer(restore_id)
    assert (answer.count, answer.stopped_by) == (0, "off")
    wait_until(lambda: rank.store_state == "on")
    again = rank.restore(restore_items(range(8)))

    assert (again.count, again.stopped_by) == (8, "")
    assert [len(located.hashes) for located in store.messages_of(LocateBlocks)] == [8, 8]
    wait_until(lambda: store.pins == {})


def test_restore_dropped_while_reading_is_answered_without_items(
    store: ScriptedStore, rank: Rank
) -> None:
    """A restore that is dropped while it is read is answered once, without items or memory."""
    hanging_file = hang_reads_of(store, block_hash(3))
    hanging_id = rank.start_restore(restore_items(range(8)), deadline_s=1_000.0)
    rank.wait_for_read(hanging_id, 3)
    rank.adopt(hanging_id, 0)
    answer = rank.wait_for_answer(hanging_id)
    hanging_file.release()

    assert (answer.count, answer.stopped_by) == (0, "late")
    assert rank.tier._staging.size_bytes == 0
    check_all_released(store)


def test_spills_are_written_during_restore_only_when_spill_queue_is_half_full(
    store: ScriptedStore,
) -> None:
    """While a restore is read no spill is written, until the spill queue is half full."""
    rank = Rank(store.address, spill_bytes_max=MIB)
    rank.store(range(4))
    hanging_file = hang_reads_of(store, block_hash(3))
    hanging_id = rank.start_restore(restore_items(range(4)), deadline_s=1_000.0)
    wait_until(lambda: len(store.pins) == 1)
    rank.spill(spill_item(block_hash(10), 300_000))
    threading.Event().wait(0.1)
    is_delayed = block_hash(10) not in rank.stored
    rank.spill(spill_item(block_hash(11), 300_000))
    wait_until(lambda: block_hash(10) in rank.stored)
    wait_until(hanging_file.release)
    rank.wait_for_answer(hanging_id)
    wait_until(lambda: block_hash(11) in rank.stored)

    assert is_delayed
