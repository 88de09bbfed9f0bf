"""Restores for rows that begin only at a checkpoint."""

import pytest

from shared.block_record import HEADER_BYTES
from shared.errors import InvariantBroken
from shared.messages import (
    QuarantineBlocks,
    RestoreItem,
)
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore, until
from tests.unit.rank_worker.stored.stored_rank import (
    TOKENS,
    Rank,
    block_hash,
    checkpoint_hash,
    hang,
    payload,
    spilled,
)


def test_checkpoints_are_restored_with_their_blocks(store: ScriptedStore) -> None:
    """The wanted prefix ends at the last checkpoint that is stored; only that one is read."""
    rank = _with_checkpoints(store, (2, 5))
    answer = rank.restore(_items(range(8)))

    assert (answer.count, answer.stopped_by) == (6, "absent")
    assert answer.bytes_read == 6 * (HEADER_BYTES + 4_096) + HEADER_BYTES + 9_000
    taken = rank.take(answer.restore_id, 6)
    assert [item.hash for item in taken] == [
        *(block_hash(number) for number in range(6)),
        checkpoint_hash(5),
    ]
    assert (taken[-1].kind, taken[-1].tokens) == ("checkpoint", 5 * TOKENS)
    assert bytes(taken[-1].payload) == payload(checkpoint_hash(5), 9_000)


def test_an_unreadable_checkpoint_falls_back_to_the_one_before(store: ScriptedStore) -> None:
    """Fewer items, still usable."""
    rank = _with_checkpoints(store, (2, 5))
    store.damage(checkpoint_hash(5), 300)
    answer = rank.restore(_items(range(8)))
    until(lambda: len(store.of(QuarantineBlocks)) == 1)

    assert (answer.count, answer.stopped_by) == (3, "unreadable")
    assert rank.take(answer.restore_id, 3)[-1].hash == checkpoint_hash(2)


def test_an_unreadable_block_falls_back_to_a_checkpoint_before_it(store: ScriptedStore) -> None:
    """Blocks behind the last checkpoint that can be reached are not counted."""
    rank = _with_checkpoints(store, (2, 5))
    store.damage(block_hash(4), 300)
    answer = rank.restore(_items(range(8)))

    assert (answer.count, answer.stopped_by) == (3, "unreadable")


def test_no_checkpoint_is_nothing(store: ScriptedStore) -> None:
    """Blocks without a state to go on from are not read at all."""
    rank = _with_checkpoints(store, ())
    answer = rank.restore(_items(range(8)))

    assert (answer.count, answer.stopped_by, answer.bytes_read) == (0, "absent", 0)


def test_resident_blocks_need_only_the_checkpoint(store: ScriptedStore) -> None:
    """Where blocks are resident already, the checkpoint alone is read and given."""
    rank = _with_checkpoints(store, (5,))
    items = [
        RestoreItem(block=None, length=TOKENS, checkpoint=checkpoint_hash(number))
        for number in range(6)
    ]
    answer = rank.restore(items)

    assert (answer.count, answer.bytes_read) == (6, HEADER_BYTES + 9_000)
    assert [item.hash for item in rank.take(answer.restore_id, 6)] == [checkpoint_hash(5)]


def test_a_checkpoint_s_restore_is_adopted_whole_or_not(store: ScriptedStore) -> None:
    """Fewer items would end where this rank holds no checkpoint: a contradiction."""
    rank = _with_checkpoints(store, (2, 5))
    answer = rank.restore(_items(range(8)))

    with pytest.raises(InvariantBroken, match="checkpoint after item 6"):
        rank.take(answer.restore_id, 3)


def test_a_deadline_before_the_checkpoint_gives_nothing(store: ScriptedStore) -> None:
    """Blocks that were read are worth nothing without it, and are not staged."""
    rank = _with_checkpoints(store, (5,))
    fifo = hang(store, block_hash(4))
    answer = rank.restore(_items(range(8)), deadline_s=0.2)
    fifo.release()

    assert (answer.count, answer.stopped_by) == (0, "late")
    assert rank.tier._staging.size_bytes == 0


def _with_checkpoints(store: ScriptedStore, numbers: tuple[int, ...]) -> Rank:
    rank = Rank(store.address)
    rank.store(range(8))
    stored = 8 + len(numbers)
    rank.spill(*(spilled(checkpoint_hash(n), 9_000, "checkpoint") for n in numbers))
    until(lambda: len(rank.stored) == stored)
    return rank


def _items(numbers: range) -> list[RestoreItem]:
    return [
        RestoreItem(block=block_hash(n), length=TOKENS, checkpoint=checkpoint_hash(n))
        for n in numbers
    ]
