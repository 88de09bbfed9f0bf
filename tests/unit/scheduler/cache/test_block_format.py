"""Format of a world's blocks: its namespace, and how many blocks are known."""

import msgspec
import pytest

from services.scheduler.cache.index import block_format
from services.scheduler.cache.kv_rows import RowBudget
from shared.configuration.loading import config_from_tree
from shared.errors import ConfigError
from tests.unit.scheduler.support.rank_messages import READY


@pytest.mark.parametrize(
    ("settings", "kv_bytes", "nodes_max"),
    [
        # 256 tokens of 100 bytes: 39 blocks in memory, twice as many known ones, or the least.
        ({"ssd": False}, 2_000_000, 4_096),
        ({"ssd": False}, 1_000_000_000, 39_062),
        ({"ssd_bytes_max": 256_000_000}, 1_000_000_000, 59_062),
        # More than the scheduler's memory has place for.
        ({}, 1_000_000_000, 131_072),
        ({"block_tokens": 1_024}, 1_000_000_000, 54_827),
    ],
)
def test_bound_of_index_follows_memory_and_stores(
    settings: dict[str, object], kv_bytes: int, nodes_max: int
) -> None:
    """The index has place for twice the blocks that memory and stores can hold, within bounds."""
    config = config_from_tree({"cache": settings})
    budget = RowBudget(kv_bytes, 100, 0)

    report = msgspec.structs.replace(READY, kv_layout="layout", context_tokens_max=10_000)

    made = block_format.make_block_format(config, [report], budget)

    assert made is not None
    assert made.nodes_max == nodes_max


def test_blocks_of_batch_invariant_worlds_have_a_namespace_of_their_own() -> None:
    """Other blocks hold decoded tokens, whose numbers differ. All ranks must have the setting."""
    budget = RowBudget(1_000_000, 100, 0)
    usual = msgspec.structs.replace(READY, kv_layout="layout", context_tokens_max=10_000)
    invariant = msgspec.structs.replace(usual, batch_invariant=True)
    settings = config_from_tree({"rank_worker": {"batch_invariant": True}})
    formats = [
        block_format.make_block_format(config_from_tree({}), [usual], budget),
        block_format.make_block_format(settings, [invariant], budget),
    ]
    assert len({one.namespace for one in formats if one is not None}) == 2
    with pytest.raises(ConfigError, match="is true for the scheduler, but not on rank 0"):
        block_format.make_block_format(settings, [usual], budget)
