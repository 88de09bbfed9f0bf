"""Restores: verified bytes or fewer items, one answer each."""

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
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore, until
from tests.unit.rank_worker.stored.stored_rank import (
    MIB,
    TOKENS,
    Rank,
    all_released,
    allocate,
    block_hash,
    blocks,
    check,
    payload,
)


def test_a_round_trip_gives_back_every_byte(store: ScriptedStore, rank: Rank) -> None:
    """What was spilled is restored, in order, with sizes and time told, and pins are released."""
    answer = rank.restore(blocks(range(8)))

    assert (answer.count, answer.stopped_by) == (8, "")
    assert answer.bytes_read == 8 * (HEADER_BYTES + 4_096)
    assert answer.read_ms > 0.0
    taken = rank.take(answer.restore_id, 8)
    check(taken, [block_hash(number) for number in range(8)])
    assert {(item.kind, item.tokens) for item in taken} == {("block", TOKENS)}
    all_released(store)


def test_another_process_finds_what_was_stored(store: ScriptedStore, rank: Rank) -> None:
    """A tier that is new reads what an earlier one wrote."""
    other = Rank(store.address)
    answer = other.restore(blocks(range(8)))

    check(other.take(answer.restore_id, 8), [block_hash(number) for number in range(8)])


def test_a_plan_may_adopt_less(rank: Rank) -> None:
    """Another rank had fewer: the first ones are given, the others forgotten."""
    answer = rank.restore(blocks(range(8)))

    check(rank.take(answer.restore_id, 3), [block_hash(number) for number in range(3)])
    with pytest.raises(InvariantBroken, match="holds 0"):
        rank.take(answer.restore_id, 3)


def test_adopting_what_is_not_there_is_a_contradiction(rank: Rank) -> None:
    """More items than were answered, a restore that nobody ordered: the epoch must end."""
    answer = rank.restore(blocks(range(4)))

    with pytest.raises(InvariantBroken, match="adopted with 5 items, but this rank holds 4"):
        rank.take(answer.restore_id, 5)
    with pytest.raises(InvariantBroken, match="restore 77 is adopted"):
        rank.take(77, 1)


def test_adopting_nothing_forgets(rank: Rank) -> None:
    """Count 0 frees what was staged; of an unknown restore it frees nothing and harms nobody."""
    answer = rank.restore(blocks(range(8)))
    assert rank.tier._staging.size_bytes == 8 * 4_096

    assert rank.take(answer.restore_id, 0) == []
    assert rank.take(77, 0) == []
    until(lambda: rank.tier._staging.size_bytes == 0)


def test_an_absent_block_ends_the_prefix(store: ScriptedStore, rank: Rank) -> None:
    """Only what lies before it is read."""
    del store.places[block_hash(5)]
    answer = rank.restore(blocks(range(8)))

    assert (answer.count, answer.stopped_by) == (5, "absent")
    assert answer.bytes_read == 5 * (HEADER_BYTES + 4_096)
    check(rank.take(answer.restore_id, 5), [block_hash(number) for number in range(5)])


def test_nothing_located_is_answered_with_nothing(store: ScriptedStore, rank: Rank) -> None:
    """A clean miss, without a quarantine."""
    answer = rank.restore(blocks(range(100, 104)))

    assert (answer.count, answer.stopped_by, answer.bytes_read) == (0, "absent", 0)
    assert store.of(QuarantineBlocks) == []
    assert rank.tier._staging._staged == {}
    all_released(store)


@pytest.mark.parametrize("at", [0, 9, 40, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4_095])
def test_a_flipped_bit_ends_the_prefix_and_is_quarantined(
    store: ScriptedStore, rank: Rank, at: int
) -> None:
    """Anywhere in a record: the block is a miss, the store hears of it, nobody gets the bytes."""
    store.damage(block_hash(3), at)
    answer = rank.restore(blocks(range(8)))
    until(lambda: len(store.of(QuarantineBlocks)) == 1)

    assert (answer.count, answer.stopped_by) == (3, "unreadable")
    assert store.of(QuarantineBlocks)[0].hashes == [block_hash(3)]
    check(rank.take(answer.restore_id, 3), [block_hash(number) for number in range(3)])
    all_released(store)


def test_a_torn_file_ends_the_prefix(store: ScriptedStore, rank: Rank) -> None:
    """The file ends in the middle of a record: what is whole before it counts."""
    place = store.places[block_hash(4)]
    os.truncate(store.folder / place.name, place.offset + place.size_bytes - 1)
    answer = rank.restore(blocks(range(8)))

    assert (answer.count, answer.stopped_by) == (4, "unreadable")


def test_a_file_that_is_gone_ends_the_prefix(store: ScriptedStore, rank: Rank) -> None:
    """Deleted behind the store's back: nothing is read, and nothing is called damaged."""
    (store.folder / store.places[block_hash(0)].name).unlink()
    answer = rank.restore(blocks(range(8)))

    assert (answer.count, answer.stopped_by) == (0, "unreadable")
    # What is damaged is told before.
    all_released(store)
    assert store.of(QuarantineBlocks) == []


def test_swapped_records_are_nobody_s(store: ScriptedStore, rank: Rank) -> None:
    """A whole record under another block's name never passes for it."""
    places = store.places
    places[block_hash(2)], places[block_hash(3)] = places[block_hash(3)], places[block_hash(2)]
    answer = rank.restore(blocks(range(8)))

    assert (answer.count, answer.stopped_by) == (2, "unreadable")


def test_a_record_of_another_rank_is_nobody_s(store: ScriptedStore, rank: Rank) -> None:
    """The shard of another rank has the same hash and other bytes."""
    path = store.folder / store.places[block_hash(0)].name
    data = bytearray(path.read_bytes())
    other = NamespaceFolder("00ff", 0, 2, store.folder).identity(block_hash(0), "block", TOKENS)
    body = payload(block_hash(0), 4_096)
    data[: HEADER_BYTES + 4_096] = block_record.build_header(other, body) + body
    path.write_bytes(data)
    answer = rank.restore(blocks(range(8)))

    assert (answer.count, answer.stopped_by) == (0, "unreadable")


def test_a_block_of_another_length_is_nobody_s(rank: Rank) -> None:
    """Tokens are part of what a record must say, and of how long its payload must be."""
    answer = rank.restore([RestoreItem(block=block_hash(0), length=TOKENS - 1)])
    assert (answer.count, answer.stopped_by) == (0, "unreadable")

    rank.tier.expect(lambda tokens: tokens * 999, MIB)
    answer = rank.restore([RestoreItem(block=block_hash(1), length=TOKENS)])
    assert (answer.count, answer.stopped_by) == (0, "unreadable")


def test_staged_bytes_are_bounded(store: ScriptedStore) -> None:
    """As many items as fit are read; when nothing fits the answer is full; freed room counts."""
    rank = Rank(store.address, staged_bytes_max=5 * 4_096)
    rank.store(range(8))
    first = rank.restore(blocks(range(3)))
    second = rank.restore(blocks(range(8)))
    third = rank.restore(blocks(range(8)))

    assert (first.count, first.stopped_by) == (3, "")
    assert (second.count, second.stopped_by) == (2, "full")
    assert (third.count, third.stopped_by) == (0, "full")
    rank.take(first.restore_id, 3)
    assert rank.restore(blocks(range(8))).count == 3


@pytest.mark.parametrize(("error", "cause"), [(RuntimeError, "full"), (KeyError, "unreadable")])
def test_an_error_that_is_not_the_record_s_ends_the_prefix(
    store: ScriptedStore, rank: Rank, error: type[Exception], cause: str
) -> None:
    """No memory on the device, or a bug of ours: a shorter prefix, no record is blamed for it."""
    plenty = rank.allocate

    def scarce(size_bytes: int) -> tuple[memoryview, Any]:
        if rank.reads > 3:
            raise error
        return plenty(size_bytes)

    rank.allocate = scarce
    answer = rank.restore(blocks(range(8)))

    assert (answer.count, answer.stopped_by) == (3, cause)
    assert store.of(QuarantineBlocks) == []


def test_memory_that_is_none_is_nobody_s_fault(store: ScriptedStore, rank: Rank) -> None:
    """MLX on a CPU gives address 0 when there is no memory: a shorter prefix, no record blamed."""

    def none(size_bytes: int) -> tuple[memoryview, Any]:
        if rank.reads > 3:
            return memoryview((ctypes.c_ubyte * size_bytes).from_address(0)).cast("B"), None
        return allocate(size_bytes)

    rank.allocate = none
    answer = rank.restore(blocks(range(8)))

    assert (answer.count, answer.stopped_by) == (3, "full")
    assert store.of(QuarantineBlocks) == []


@pytest.mark.parametrize("piece_bytes", [1, 100, 4_095, 4_096, 5_000])
def test_every_piece_is_verified(
    store: ScriptedStore, rank: Rank, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """However many pieces a record is read in: whole it is given, changed in any it is not."""
    monkeypatch.setattr(record_files, "PIECE_BYTES", piece_bytes)
    names = [block_hash(number) for number in range(8)]
    answer = rank.restore(blocks(range(8)))
    check(rank.take(answer.restore_id, 8), names)
    places = dict(store.places)
    for tries, at in enumerate([0, 99, 100, 2_000, 4_094, 4_095], 1):
        store.damage(names[5], HEADER_BYTES + at)
        assert rank.restore(blocks(range(8))).count == 5
        until(lambda: len(store.of(QuarantineBlocks)) == tries)  # noqa: B023 - called here
        store.places = dict(places)
        store.damage(names[5], HEADER_BYTES + at)


def test_restores_never_mix(store: ScriptedStore) -> None:
    """Many at once, of overlapping blocks: each gives its own items, whole and in order."""
    draw = random.Random(3)
    rank = Rank(store.address)
    for first in range(0, 40, 8):
        rank.store(range(first, first + 8), 20_000)
    wanted = {}
    for _ in range(60):
        first = draw.randrange(32)
        wanted[rank.order(blocks(range(first, first + draw.randint(1, 8))))] = first
    for restore_id, first in wanted.items():
        count = rank.answer(restore_id).count
        taken = rank.take(restore_id, draw.randint(1, count))
        check(taken, [block_hash(first + n) for n in range(len(taken))], 20_000)
    all_released(store)


def test_parts_of_one_restore_are_read_by_several_threads(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the parts are shared out, the items are those that were asked for, in order."""
    monkeypatch.setattr(restore_task, "CLAIM_BYTES", 20_000)
    monkeypatch.setattr(disk_threads, "CLAIM_BYTES", 20_000)
    rank = Rank(store.address)
    rank.store(range(64), 6_000)
    for _ in range(10):
        answer = rank.restore(blocks(range(64)))
        assert (answer.count, answer.bytes_read) == (64, 64 * (HEADER_BYTES + 6_000))
        check(rank.take(answer.restore_id, 64), [block_hash(n) for n in range(64)], 6_000)
    store.damage(block_hash(9), 1_000)
    answer = rank.restore(blocks(range(64)))

    assert (answer.count, answer.stopped_by) == (9, "unreadable")
    check(rank.take(answer.restore_id, 9), [block_hash(n) for n in range(9)], 6_000)


def test_wrong_bytes_are_never_given(store: ScriptedStore) -> None:
    """Random flips, cuts, swaps, moves and foreign bytes: what is given is right, or not given."""
    draw = random.Random(11)
    rank = Rank(store.address)
    for first in range(0, 12, 3):
        rank.store(range(first, first + 3), 500)
    places = dict(store.places)
    whole = {path: path.read_bytes() for path in store.folder.iterdir()}
    given = 0
    for _ in range(300):
        for path, data in whole.items():
            path.write_bytes(data)
        store.places = dict(places)
        for _ in range(draw.randint(1, 3)):
            _damage(store, draw)
        answer = rank.restore(blocks(range(12)))
        if answer.count:
            taken = rank.take(answer.restore_id, answer.count)
            check(taken, [block_hash(n) for n in range(answer.count)], 500)
        given += answer.count

    assert 0 < given < 300 * 12


def _damage(store: ScriptedStore, draw: random.Random) -> None:
    one, other = (block_hash(number) for number in draw.sample(range(12), 2))
    place = store.places[one]
    path = store.folder / place.name
    match draw.randint(0, 4):
        case 0:
            store.damage(one, draw.randrange(place.size_bytes), 1 << draw.randint(0, 7))
        case 1:
            os.truncate(path, draw.randrange(path.stat().st_size))
        case 2:
            store.places[one], store.places[other] = store.places[other], store.places[one]
        case 3:
            store.places[one] = BlockPlace(
                name=place.name,
                offset=draw.randrange(1_000),
                size_bytes=draw.randrange(2_000),
            )
        case _:
            path.write_bytes(draw.randbytes(path.stat().st_size))
