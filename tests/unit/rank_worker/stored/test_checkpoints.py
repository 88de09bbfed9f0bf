"""Restores of models whose rows can begin only at a checkpoint."""

import pytest

from shared.block_record import HEADER_BYTES
from shared.errors import InvariantBroken
from shared.messages import (
    QuarantineBlocks,
    RestoreItem,
)
from tests.support.waiting import wait_until
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore
from tests.unit.rank_worker.stored.stored_rank import (
    TOKENS,
    Rank,
    block_hash,
    checkpoint_hash,
    hang_reads_of,
    payload,
    spill_item,
)


def test_restored_prefix_ends_at_last_stored_checkpoint(store: ScriptedStore) -> None:
    """The restored prefix ends at the last stored checkpoint, and only that checkpoint is read."""
    rank = _rank_with_checkpoints(store, (2, 5))
    answer = rank.restore(_restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (6, "absent")
    assert answer.bytes_read == 6 * (HEADER_BYTES + 4_096) + HEADER_BYTES + 9_000
    taken = rank.adopt(answer.restore_id, 6)
    assert [item.hash for item in taken] == [
        *(block_hash(number) for number in range(6)),
        checkpoint_hash(5),
    ]
    assert (taken[-1].kind, taken[-1].tokens) == ("checkpoint", 5 * TOKENS)
    assert bytes(taken[-1].payload) == payload(checkpoint_hash(5), 9_000)


def test_restored_prefix_ends_at_earlier_checkpoint_when_last_is_unreadable(
    store: ScriptedStore,
) -> None:
    """When the last checkpoint is unreadable, the prefix ends at the one before it."""
    rank = _rank_with_checkpoints(store, (2, 5))
    store.damage(checkpoint_hash(5), 300)
    answer = rank.restore(_restore_items(range(8)))
    wait_until(lambda: len(store.messages_of(QuarantineBlocks)) == 1)

    assert (answer.count, answer.stopped_by) == (3, "unreadable")
    assert rank.adopt(answer.restore_id, 3)[-1].hash == checkpoint_hash(2)


def test_restored_prefix_ends_at_checkpoint_before_unreadable_block(store: ScriptedStore) -> None:
    """When a block is unreadable, the prefix ends at the last checkpoint before it."""
    rank = _rank_with_checkpoints(store, (2, 5))
    store.damage(block_hash(4), 300)
    answer = rank.restore(_restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (3, "unreadable")


def test_restore_reads_no_blocks_when_no_checkpoint_is_stored(store: ScriptedStore) -> None:
    """Blocks without a stored checkpoint are not read."""
    rank = _rank_with_checkpoints(store, ())
    answer = rank.restore(_restore_items(range(8)))

    assert (answer.count, answer.stopped_by, answer.bytes_read) == (0, "absent", 0)


def test_restore_of_resident_blocks_reads_only_checkpoint(store: ScriptedStore) -> None:
    """For resident blocks only the checkpoint is read and adopted."""
    rank = _rank_with_checkpoints(store, (5,))
    items = [
        RestoreItem(block=None, length=TOKENS, checkpoint=checkpoint_hash(number))
        for number in range(6)
    ]
    answer = rank.restore(items)

    assert (answer.count, answer.bytes_read) == (6, HEADER_BYTES + 9_000)
    assert [item.hash for item in rank.adopt(answer.restore_id, 6)] == [checkpoint_hash(5)]


def test_adopting_restored_blocks_without_their_checkpoint_raises_invariant_broken(
    store: ScriptedStore,
) -> None:
    """Adopting fewer items than the prefix with its last checkpoint raises InvariantBroken."""
    rank = _rank_with_checkpoints(store, (2, 5))
    answer = rank.restore(_restore_items(range(8)))

    with pytest.raises(InvariantBroken, match="checkpoint after item 6"):
        rank.adopt(answer.restore_id, 3)


def test_restore_not_reaching_checkpoint_by_deadline_returns_late_without_blocks(
    store: ScriptedStore,
) -> None:
    """When the deadline passes before the checkpoint is read, the answer is `late`
    without blocks.
    """
    rank = _rank_with_checkpoints(store, (5,))
    hanging_file = hang_reads_of(store, block_hash(4))
    answer = rank.restore(_restore_items(range(8)), deadline_s=0.2)
    hanging_file.release()

    assert (answer.count, answer.stopped_by) == (0, "late")
    assert rank.tier._staging.size_bytes == 0


def _rank_with_checkpoints(store: ScriptedStore, numbers: tuple[int, ...]) -> Rank:
    rank = Rank(store.address)
    rank.store(range(8))
    stored = 8 + len(numbers)
    rank.spill(*(spill_item(checkpoint_hash(n), 9_000, "checkpoint") for n in numbers))
    wait_until(lambda: len(rank.stored) == stored)
    return rank


def _restore_items(numbers: range) -> list[RestoreItem]:
    return [
        RestoreItem(block=block_hash(n), length=TOKENS, checkpoint=checkpoint_hash(n))
        for n in numbers
    ]
