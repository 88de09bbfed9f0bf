"""Quarantine of block files with bad records."""

from shared.messages import QuarantineBlocks
from tests.unit.cache_store.conftest import MakeStore
from tests.unit.cache_store.harness import RECORD_BYTES, Rank, Store, block_hash


def test_cache_store_locates_older_copy_when_newer_record_is_quarantined(
    make_store: MakeStore,
) -> None:
    """Quarantine removes the whole file of the bad record; older copies in other files are
    located."""
    rank = Rank(make_store())
    rank.commit(1, 2)
    rank.commit(1, 3)

    rank.send(QuarantineBlocks(hashes=[block_hash(1)], cause="damaged: bits have changed"))

    assert rank.has(1, 2, 3) == [True, True, False]
    rank.send(QuarantineBlocks(hashes=[block_hash(1)], cause="damaged: bits have changed"))
    assert rank.has(1, 2, 3) == [False] * 3
    assert Rank(make_store()).has(1, 2, 3) == [False] * 3


def test_file_of_bad_record_moves_to_quarantine_and_is_not_located(
    store: Store, rank: Rank
) -> None:
    """The file of a bad record is no longer located; it moves to the quarantine when its pins are
    released."""
    rank.commit(1, 2)
    rank.commit(3)
    query_id, _ = rank.locate(1)

    rank.send(QuarantineBlocks(hashes=[block_hash(1)], cause="damaged: bits have changed"))

    assert rank.has(1, 2, 3) == [False, False, True]
    assert len(store.files()) == 2, "it is still being read"
    rank.release(query_id)
    assert len(store.files()) == 1
    (kept,) = (store.directory.path / "quarantine").iterdir()
    assert kept.stat().st_size == 2 * RECORD_BYTES
    assert store.report().counters["quarantined_damaged_total"] == 1
    assert rank.commit(1, 2).accepted
    assert rank.has(1, 2) == [True, True]


def test_quarantine_keeps_only_its_16_newest_files(make_store: MakeStore) -> None:
    """At most 16 files are kept, also across a restart; unknown causes are counted as `other`."""
    rank = Rank(make_store())
    for number in range(20):
        rank.commit(number)
        rank.send(QuarantineBlocks(hashes=[block_hash(number)], cause="No such file"))
    folder = rank.store.directory.path / "quarantine"
    kept = {path.name[-71:] for path in folder.iterdir()}

    assert rank.store.report().counters["quarantined_other_total"] == 20
    assert kept == {f"{block_hash(number).hex()}.blocks" for number in range(4, 20)}
    rank = Rank(make_store())
    rank.commit(30)
    rank.send(QuarantineBlocks(hashes=[block_hash(30)], cause="torn: cut off"))
    assert f"{block_hash(4).hex()}.blocks" not in {path.name[-71:] for path in folder.iterdir()}
