"""The format of blocks in one epoch: namespace, length and bytes."""

import dataclasses
from collections.abc import Sequence

from services.scheduler.cache.index.block_index import NODES_MAX
from services.scheduler.cache.index.hashes import namespace_of
from services.scheduler.cache.kv_rows import RowBudget
from shared import limits
from shared.configuration.settings import CacheConfig, Config
from shared.errors import ConfigError
from shared.messages import RankReady
from shared.messages.token_ids import TOKEN_BYTES

INDEX_BYTES_MAX = 256 * 2**20
"""Most memory of the scheduler for known blocks."""
NODE_BYTES = 800
"""Memory of one known block beside its packed tokens (measured: 730 to 780)."""
_NODES_MIN = 4_096
_NODES_PER_BLOCK = 2
"""Known blocks for each whole block that memory and stores can hold: ends of sequences are shorter
than a whole block, and evicted blocks explain why a prompt was not found."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFormat:
    """Namespace, length and bytes of the blocks of one epoch, equal for all ranks.

    Bytes are those of the rank where they are largest.
    """

    namespace: str
    block_tokens: int
    """Tokens of a whole block."""
    bytes_per_token: int
    checkpoint_bytes: int
    needs_checkpoints: bool
    """Rows can reuse blocks only up to a checkpoint."""
    bytes_max: int
    """Most memory per rank for blocks and checkpoints; rows may leave less."""
    ranks: int
    nodes_max: int
    """Most blocks that the scheduler knows, resident, stored or evicted."""

    def block_bytes(self, tokens: int) -> int:
        """Return the bytes per rank of a block of `tokens` tokens."""
        return tokens * self.bytes_per_token


def make_block_format(
    settings: Config, reports: Sequence[RankReady], budget: RowBudget
) -> BlockFormat | None:
    """Return the block format of a world, or None when it keeps no blocks.

    Args:
        settings: the scheduler's.
        reports: the reports of all ranks, in rank order.
        budget: KV memory and row sizes of the epoch, as from `smallest_budget`.

    Raises:
        ConfigError: a block is longer than the model's context, or the ranks have another
            `rank_worker.batch_invariant` than the scheduler.
    """
    config, is_invariant = settings.cache, settings.rank_worker.batch_invariant
    others = [one for one in reports if one.batch_invariant != is_invariant]
    if others:
        raise ConfigError(
            f"rank_worker.batch_invariant is {str(is_invariant).lower()} for the scheduler, but "
            f"not on rank {others[0].rank}: give the scheduler and all ranks the same setting."
        )
    if not config.enabled or not all(report.kv_layout for report in reports):
        return None
    context = min(report.context_tokens_max for report in reports)
    if config.block_tokens > context:
        raise ConfigError(_block_too_long(config.block_tokens, context))
    # Blocks hold no KV of a draft model, so worlds with different ones share blocks.
    model = reports[0].model_fingerprint.partition("+")[0]
    layouts = [one.kv_layout for one in reports]
    if is_invariant:
        # Other blocks hold decoded tokens, and prompts that were cut elsewhere.
        layouts.append("batch invariant")
    bytes_max = min(config.resident_bytes_max or budget.bytes_max // 2, budget.bytes_max)
    return BlockFormat(
        namespace=namespace_of(model, layouts, config.block_tokens),
        block_tokens=config.block_tokens,
        bytes_per_token=budget.bytes_per_token,
        checkpoint_bytes=budget.bytes_per_row,
        needs_checkpoints=any(report.needs_checkpoints for report in reports),
        bytes_max=bytes_max,
        ranks=len(reports),
        nodes_max=_nodes_max(config, bytes_max, config.block_tokens * budget.bytes_per_token),
    )


def _nodes_max(config: CacheConfig, resident_bytes_max: int, block_bytes: int) -> int:
    """Return how many blocks are worth knowing: those that can exist, as far as memory allows."""
    stored_bytes_max = config.ssd_bytes_max or limits.STORE_BYTES_DEFAULT_MAX
    copies_bytes = resident_bytes_max + (stored_bytes_max if config.ssd else 0)
    wanted = _NODES_PER_BLOCK * copies_bytes // max(1, block_bytes)
    most = INDEX_BYTES_MAX // (NODE_BYTES + TOKEN_BYTES * config.block_tokens)
    return min(most, NODES_MAX, max(_NODES_MIN, wanted))


def _block_too_long(block_tokens: int, context: int) -> str:
    text = f"cache.block_tokens is {block_tokens}, but the model's context has {context} tokens: "
    if context >= limits.BLOCK_TOKENS_MIN:
        return f"{text}set it to {limits.BLOCK_TOKENS_MIN} up to {context}."
    return f"{text}set cache.enabled to false."
