"""Blocks in a real cache store, used by real ranks after a restart."""

import shutil
from collections.abc import Callable
from functools import cache
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
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that gives the folder with blocks of one prompt, stored by a number of
    ranks."""

    @cache
    def fill(ranks: int) -> Path:
        # Before the cluster starts, because a client that waits here would be lost as silent.
        expected = uncached_tokens()[0]
        blocks = tmp_path_factory.mktemp("stored")
        with cluster(ranks, blocks, **SETTINGS) as client:
            tokens, found = generate(client, "cold", PROMPTS[0])
            assert (tokens, found) == (expected, 0)
            client.wait_for_spills(len(PROMPTS[0]) // BLOCK)
        return blocks

    return fill


@pytest.mark.parametrize(
    ("ranks", "damage"),
    [
        (2, "nothing"),
        (2, "deleted"),
        (2, "flipped"),
        (2, "torn"),
        (4, "deleted"),
    ],
)
def test_restart_reuses_only_stored_blocks_undamaged_on_every_rank(
    stored: Callable[[int], Path], tmp_path: Path, ranks: int, damage: str
) -> None:
    """Blocks come from the store after a restart; blocks that one rank has lost are used by
    none."""
    blocks = shutil.copytree(stored(ranks), tmp_path / "blocks")
    (folder,) = blocks.glob(f"*/rank-1-of-{ranks}")
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

    with cluster(ranks, blocks, **SETTINGS) as client:
        tokens, found = generate(client, "restored", PROMPTS[0])
        status = client.query_status()

    assert tokens == uncached_tokens()[0]
    whole = len(PROMPTS[0]) // BLOCK * BLOCK
    assert found == whole if damage == "nothing" else found < whole
    assert status.counters["epochs_total"] == 1.0


def test_one_rank_does_not_find_blocks_stored_by_two(
    stored: Callable[[int], Path], tmp_path: Path
) -> None:
    """Blocks of two ranks are not found by one rank."""
    blocks = shutil.copytree(stored(2), tmp_path / "blocks")
    with cluster(1, blocks, **SETTINGS) as client:
        assert generate(client, "alone", PROMPTS[0]) == (uncached_tokens()[0], 0)
