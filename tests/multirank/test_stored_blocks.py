"""Blocks on SSD, with real ranks and a real store: they outlive processes, and never lie."""

import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.multirank.cache_work import BLOCK, PROMPTS, SETTINGS, ask, reference
from tests.multirank.cluster import Client, cluster


def _spilled(client: Client, blocks: int) -> None:
    """Wait until so many blocks are stored on every rank."""
    until_s = time.monotonic() + 30.0
    while client.ask_status().counters.get("cache_blocks_spilled_total", 0.0) < blocks:
        assert time.monotonic() < until_s, client.ask_status().counters
        time.sleep(0.05)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """What so many ranks have stored of one prompt; their processes are gone."""

    @cache
    def fill(ranks: int) -> Path:
        # First: a client that waits for another cluster meanwhile is silent, and lost for that.
        expected = reference()[0]
        blocks = tmp_path_factory.mktemp("stored")
        with cluster(ranks, blocks, **SETTINGS) as client:
            tokens, found = ask(client, "cold", PROMPTS[0])
            assert (tokens, found) == (expected, 0)
            _spilled(client, len(PROMPTS[0]) // BLOCK)
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
        (4, "flipped"),
    ],
)
def test_blocks_outlive_all_processes(
    stored: Callable[[int], Path], tmp_path: Path, ranks: int, damage: str
) -> None:
    """After a restart blocks come from SSD; what one rank has lost, no rank uses."""
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
        tokens, found = ask(client, "restored", PROMPTS[0])
        status = client.ask_status()

    assert tokens == reference()[0]
    whole = len(PROMPTS[0]) // BLOCK * BLOCK
    assert found == whole if damage == "nothing" else found < whole
    assert status.counters["epochs_total"] == 1.0


def test_another_world_size_is_a_clean_miss(stored: Callable[[int], Path], tmp_path: Path) -> None:
    """What two ranks have stored is not for one rank: nothing is found, nothing is wrong."""
    blocks = shutil.copytree(stored(2), tmp_path / "blocks")
    with cluster(1, blocks, **SETTINGS) as client:
        assert ask(client, "alone", PROMPTS[0]) == (reference()[0], 0)
