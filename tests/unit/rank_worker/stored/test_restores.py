"""Restores: checked bytes or a shorter prefix, and exactly one answer."""

import ctypes
import os
import random
from typing import Any

import pytest

from services.rank_worker.kv_cache.stored import disk_threads, record_files, restore_task
from services.rank_worker.kv_cache.stored.record_files import NamespaceFolder
from shared import block_record
from shared.block_record import HEADER_BYTES
from shared.errors import InvariantBroken
from shared.messages import (
    BlockPlace,
    QuarantineBlocks,
    RestoreItem,
)
from tests.support.waiting import wait_until
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore
from tests.unit.rank_worker.stored.stored_rank import (
    MIB,
    TOKENS,
    Rank,
    allocate,
    block_hash,
    check_all_released,
    check_items,
    payload,
    restore_items,
)


def _wait_for_quarantines(store: ScriptedStore, count: int) -> None:
    wait_until(lambda: len(store.messages_of(QuarantineBlocks)) == count)


def test_restore_returns_spilled_items_in_order(store: ScriptedStore, rank: Rank) -> None:
    """Restored items equal the spilled ones; sizes and time are reported and pins released."""
    answer = rank.restore(restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (8, "")
    assert answer.bytes_read == 8 * (HEADER_BYTES + 4_096)
    assert answer.read_ms > 0.0
    items = rank.adopt(answer.restore_id, 8)
    check_items(items, [block_hash(number) for number in range(8)])
    assert {(item.kind, item.tokens) for item in items} == {("block", TOKENS)}
    check_all_released(store)


def test_second_client_of_store_restores_blocks_stored_by_first(
    store: ScriptedStore, rank: Rank
) -> None:
    """A second client of the store restores the blocks that the first one stored."""
    other = Rank(store.address)
    answer = other.restore(restore_items(range(8)))

    check_items(other.adopt(answer.restore_id, 8), [block_hash(number) for number in range(8)])


def test_adopting_some_restored_items_frees_remaining_items(rank: Rank) -> None:
    """A plan may adopt fewer items than were read; the others are freed."""
    answer = rank.restore(restore_items(range(8)))

    check_items(rank.adopt(answer.restore_id, 3), [block_hash(number) for number in range(3)])
    with pytest.raises(InvariantBroken, match="holds 0"):
        rank.adopt(answer.restore_id, 3)


def test_adopting_more_items_than_were_read_raises_invariant_broken(rank: Rank) -> None:
    """Adopting more items than were read, or an unknown restore, raises InvariantBroken."""
    answer = rank.restore(restore_items(range(4)))

    with pytest.raises(InvariantBroken, match="adopted with 5 items, but this rank holds 4"):
        rank.adopt(answer.restore_id, 5)
    with pytest.raises(InvariantBroken, match="restore 77 is adopted"):
        rank.adopt(77, 1)


def test_adopting_zero_restored_items_frees_their_memory(rank: Rank) -> None:
    """Count 0 frees the staged items; for an unknown restore it does nothing."""
    answer = rank.restore(restore_items(range(8)))
    assert rank.tier._staging.size_bytes == 8 * 4_096

    assert rank.adopt(answer.restore_id, 0) == []
    assert rank.adopt(77, 0) == []
    wait_until(lambda: rank.tier._staging.size_bytes == 0)


def test_restored_prefix_ends_before_absent_block(store: ScriptedStore, rank: Rank) -> None:
    """Only the items before an absent block are read."""
    del store.places[block_hash(5)]
    answer = rank.restore(restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (5, "absent")
    assert answer.bytes_read == 5 * (HEADER_BYTES + 4_096)
    check_items(rank.adopt(answer.restore_id, 5), [block_hash(number) for number in range(5)])


def test_restore_of_unknown_blocks_returns_no_items_and_quarantines_none(
    store: ScriptedStore, rank: Rank
) -> None:
    """A restore without any located block is answered with 0 items and no quarantine."""
    answer = rank.restore(restore_items(range(100, 104)))

    assert (answer.count, answer.stopped_by, answer.bytes_read) == (0, "absent", 0)
    assert store.messages_of(QuarantineBlocks) == []
    assert rank.tier._staging._staged == {}
    check_all_released(store)


@pytest.mark.parametrize("at", [0, 9, 40, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4_095])
def test_record_with_flipped_bit_ends_restored_prefix_and_is_quarantined(
    store: ScriptedStore, rank: Rank, at: int
) -> None:
    """A flipped bit anywhere in a record makes it a miss, and the store is told."""
    store.damage(block_hash(3), at)
    answer = rank.restore(restore_items(range(8)))
    _wait_for_quarantines(store, 1)

    assert (answer.count, answer.stopped_by) == (3, "unreadable")
    assert store.messages_of(QuarantineBlocks)[0].hashes == [block_hash(3)]
    check_items(rank.adopt(answer.restore_id, 3), [block_hash(number) for number in range(3)])
    check_all_released(store)


def test_restored_prefix_ends_before_record_cut_by_torn_file(
    store: ScriptedStore, rank: Rank
) -> None:
    """Records before the end of a torn file are restored."""
    place = store.places[block_hash(4)]
    os.truncate(store.folder / place.name, place.offset + place.size_bytes - 1)
    answer = rank.restore(restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (4, "unreadable")


def test_deleted_file_ends_restored_prefix_without_quarantine(
    store: ScriptedStore, rank: Rank
) -> None:
    """A deleted file is a miss, not damage."""
    (store.folder / store.places[block_hash(0)].name).unlink()
    answer = rank.restore(restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (0, "unreadable")
    # A quarantine message would be sent before the release.
    check_all_released(store)
    assert store.messages_of(QuarantineBlocks) == []


def test_record_found_at_location_of_other_block_counts_as_unreadable(
    store: ScriptedStore, rank: Rank
) -> None:
    """A whole record at the location of another block is unreadable and ends the restored
    prefix.
    """
    places = store.places
    places[block_hash(2)], places[block_hash(3)] = places[block_hash(3)], places[block_hash(2)]
    answer = rank.restore(restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (2, "unreadable")


def test_record_of_other_rank_counts_as_unreadable(store: ScriptedStore, rank: Rank) -> None:
    """A record of another rank has the same hash and is a miss."""
    path = store.folder / store.places[block_hash(0)].name
    data = bytearray(path.read_bytes())
    other = NamespaceFolder("00ff", 0, 2, store.folder).identity(block_hash(0), "block", TOKENS)
    body = payload(block_hash(0), 4_096)
    data[: HEADER_BYTES + 4_096] = block_record.build_header(other, body) + body
    path.write_bytes(data)
    answer = rank.restore(restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (0, "unreadable")


def test_record_with_other_token_count_or_size_counts_as_unreadable(rank: Rank) -> None:
    """A record with another number of tokens or another payload size is a miss."""
    answer = rank.restore([RestoreItem(block=block_hash(0), length=TOKENS - 1)])
    assert (answer.count, answer.stopped_by) == (0, "unreadable")

    rank.tier.expect(lambda tokens: tokens * 999, MIB)
    answer = rank.restore([RestoreItem(block=block_hash(1), length=TOKENS)])
    assert (answer.count, answer.stopped_by) == (0, "unreadable")


def test_restore_reads_only_items_that_fit_staging_memory_limit(store: ScriptedStore) -> None:
    """Restores read as many items as fit; freed memory can be used again."""
    rank = Rank(store.address, staged_bytes_max=5 * 4_096)
    rank.store(range(8))
    first = rank.restore(restore_items(range(3)))
    second = rank.restore(restore_items(range(8)))
    third = rank.restore(restore_items(range(8)))

    assert (first.count, first.stopped_by) == (3, "")
    assert (second.count, second.stopped_by) == (2, "full")
    assert (third.count, third.stopped_by) == (0, "full")
    rank.adopt(first.restore_id, 3)
    assert rank.restore(restore_items(range(8))).count == 3


@pytest.mark.parametrize(("error", "cause"), [(RuntimeError, "full"), (KeyError, "unreadable")])
def test_allocation_error_ends_restored_prefix_without_quarantine(
    store: ScriptedStore, rank: Rank, error: type[Exception], cause: str
) -> None:
    """An allocation error shortens the prefix and quarantines no record."""
    allocate_memory = rank.allocate

    def allocate_until_full(size_bytes: int) -> tuple[memoryview, Any]:
        if rank.reads > 3:
            raise error
        return allocate_memory(size_bytes)

    rank.allocate = allocate_until_full
    answer = rank.restore(restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (3, cause)
    assert store.messages_of(QuarantineBlocks) == []


def test_allocation_at_address_0_ends_restored_prefix_without_quarantine(
    store: ScriptedStore, rank: Rank
) -> None:
    """MLX on a CPU returns address 0 without memory: the prefix is shorter, no record
    quarantined."""

    def allocate_null(size_bytes: int) -> tuple[memoryview, Any]:
        if rank.reads > 3:
            return memoryview((ctypes.c_ubyte * size_bytes).from_address(0)).cast("B"), None
        return allocate(size_bytes)

    rank.allocate = allocate_null
    answer = rank.restore(restore_items(range(8)))

    assert (answer.count, answer.stopped_by) == (3, "full")
    assert store.messages_of(QuarantineBlocks) == []


@pytest.mark.parametrize("piece_bytes", [1, 100, 4_095, 4_096, 5_000])
def test_record_read_in_pieces_is_refused_when_any_piece_changed(
    store: ScriptedStore, rank: Rank, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """A record read in pieces is restored only if every piece is unchanged."""
    monkeypatch.setattr(record_files, "PIECE_BYTES", piece_bytes)
    names = [block_hash(number) for number in range(8)]
    answer = rank.restore(restore_items(range(8)))
    check_items(rank.adopt(answer.restore_id, 8), names)
    places = dict(store.places)
    for tries, at in enumerate([0, 99, 100, 2_000, 4_094, 4_095], 1):
        store.damage(names[5], HEADER_BYTES + at)
        assert rank.restore(restore_items(range(8))).count == 5
        _wait_for_quarantines(store, tries)
        store.places = dict(places)
        store.damage(names[5], HEADER_BYTES + at)


def test_concurrent_restores_of_overlapping_blocks_return_their_own_items(
    store: ScriptedStore,
) -> None:
    """Concurrent restores of overlapping blocks each return their own items in order."""
    rng = random.Random(3)
    rank = Rank(store.address)
    for first in range(0, 40, 8):
        rank.store(range(first, first + 8), 20_000)
    wanted = {}
    for _ in range(60):
        first = rng.randrange(32)
        wanted[rank.start_restore(restore_items(range(first, first + rng.randint(1, 8))))] = first
    for restore_id, first in wanted.items():
        count = rank.wait_for_answer(restore_id).count
        items = rank.adopt(restore_id, rng.randint(1, count))
        check_items(items, [block_hash(first + n) for n in range(len(items))], 20_000)
    check_all_released(store)


def test_items_read_by_several_threads_are_restored_in_order(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that several threads read are returned in order."""
    monkeypatch.setattr(restore_task, "CLAIM_BYTES", 20_000)
    monkeypatch.setattr(disk_threads, "CLAIM_BYTES", 20_000)
    rank = Rank(store.address)
    rank.store(range(64), 6_000)
    for _ in range(10):
        answer = rank.restore(restore_items(range(64)))
        assert (answer.count, answer.bytes_read) == (64, 64 * (HEADER_BYTES + 6_000))
        check_items(rank.adopt(answer.restore_id, 64), [block_hash(n) for n in range(64)], 6_000)
    store.damage(block_hash(9), 1_000)
    answer = rank.restore(restore_items(range(64)))

    assert (answer.count, answer.stopped_by) == (9, "unreadable")
    check_items(rank.adopt(answer.restore_id, 9), [block_hash(n) for n in range(9)], 6_000)


def test_restore_never_returns_wrong_bytes_under_random_damage(store: ScriptedStore) -> None:
    """Under random damage each restored item has the right bytes."""
    rng = random.Random(11)
    rank = Rank(store.address)
    for first in range(0, 12, 3):
        rank.store(range(first, first + 3), 500)
    places = dict(store.places)
    whole = {path: path.read_bytes() for path in store.folder.iterdir()}
    restored = 0
    for _ in range(300):
        for path, data in whole.items():
            path.write_bytes(data)
        store.places = dict(places)
        for _ in range(rng.randint(1, 3)):
            _damage(store, rng)
        answer = rank.restore(restore_items(range(12)))
        if answer.count:
            items = rank.adopt(answer.restore_id, answer.count)
            check_items(items, [block_hash(n) for n in range(answer.count)], 500)
        restored += answer.count

    assert 0 < restored < 300 * 12


def _damage(store: ScriptedStore, rng: random.Random) -> None:
    one, other = (block_hash(number) for number in rng.sample(range(12), 2))
    place = store.places[one]
    path = store.folder / place.name
    match rng.randint(0, 4):
        case 0:
            store.damage(one, rng.randrange(place.size_bytes), 1 << rng.randint(0, 7))
        case 1:
            os.truncate(path, rng.randrange(path.stat().st_size))
        case 2:
            store.places[one], store.places[other] = store.places[other], store.places[one]
        case 3:
            store.places[one] = BlockPlace(
                name=place.name,
                offset=rng.randrange(1_000),
                size_bytes=rng.randrange(2_000),
            )
        case _:
            path.write_bytes(rng.randbytes(path.stat().st_size))
