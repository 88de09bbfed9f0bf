"""Blocks in a real cache store, used by real ranks after a restart."""

import shutil
from pathlib import Path

import pytest

from tests.multirank.worlds.cached_prompts import (
    BLOCK,
    PROMPTS,
    SETTINGS,
    generate,
    uncached_tokens,
)
from tests.multirank.worlds.cluster import cluster

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with blocks of one prompt that two ranks have stored."""
    # Before the cluster starts, because a client that waits here would be lost as silent.
    expected = uncached_tokens()[0]
    blocks = tmp_path_factory.mktemp("stored")
    with cluster(2, blocks, **SETTINGS) as client:
        tokens, found = generate(client, "cold", PROMPTS[0])
        assert (tokens, found) == (expected, 0)
        client.wait_for_spills(len(PROMPTS[0]) // BLOCK)
    return blocks


@pytest.mark.parametrize("damage", ["nothing", "deleted", "flipped", "torn"])
def test_restart_reuses_only_stored_blocks_undamaged_on_every_rank(
    stored: Path, tmp_path: Path, damage: str
) -> None:
    """Blocks come from the store after a restart; blocks that one rank has lost are used by
    none."""
    blocks = shutil.copytree(stored, tmp_path / "blocks")
    (folder,) = blocks.glob("*/rank-1-of-2")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    assert files
    for path in files if damage != "nothing" else []:
        content = bytearray(path.read_bytes())
        if damage == "deleted":
            path.unlink()
        elif damage == "flipped":
            content[-7] ^= 4
            path.write_bytes(content)
        else:
            path.write_bytes(content[: len(content) // 2])

    with cluster(2, blocks, **SETTINGS) as client:
        tokens, found = generate(client, "restored", PROMPTS[0])
        status = client.query_status()

    assert tokens == uncached_tokens()[0]
    whole = len(PROMPTS[0]) // BLOCK * BLOCK
    assert found == whole if damage == "nothing" else found < whole
    assert status.counters["epochs_total"] == 1.0


def test_one_rank_does_not_find_blocks_stored_by_two(stored: Path, tmp_path: Path) -> None:
    """Blocks of two ranks are not found by one rank."""
    blocks = shutil.copytree(stored, tmp_path / "blocks")
    with cluster(1, blocks, **SETTINGS) as client:
        assert generate(client, "alone", PROMPTS[0]) == (uncached_tokens()[0], 0)
