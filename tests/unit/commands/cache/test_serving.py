"""Stored blocks that serve a world: the sentence, and the table of `lockstep cache list`."""

from services.commands.cache.serving import StoredBlocks
from services.commands.cache.tables import listing
from shared.messages import StoredFolder


def _folder(namespace: str, rank: int = 0) -> StoredFolder:
    return StoredFolder(
        namespace=namespace, rank=rank, world_size=2, records=3, size_bytes=2**20, used_s=1.0
    )


def test_stored_blocks_are_explained_by_numbers_and_bytes_of_both_kinds() -> None:
    """Blocks that serve and blocks that do not are counted; the command that lists them follows."""
    some = StoredBlocks(12, 3 * 2**20, 45, 2**30, ("aa", "bb"))
    every = StoredBlocks(1, 2**20, 0, 0, ())

    assert some.explain() == (
        "On this host's SSD 12 blocks (3.0 MiB) serve this world; 45 blocks (1.0 GiB) of 2 other "
        "namespaces do not, until their model and split return (`lockstep cache list`)."
    )
    assert every.explain() == "All stored blocks of this host serve this world: 1 block (1.0 MiB)."


def test_cache_list_marks_namespace_of_running_world() -> None:
    """With a running world each line says whether it serves; without one the column is left out."""
    folders = [_folder("aa"), _folder("bb", 1)]

    lines = listing(folders, "bb").splitlines()

    assert [line.split()[-1] for line in lines] == ["serves", "no", "yes"]
    assert "serves" not in listing(folders)
