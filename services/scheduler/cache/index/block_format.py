"""What a block is in one epoch: its namespace, its length, what it takes."""

import dataclasses
from collections.abc import Sequence

from services.scheduler.cache.index.hashes import namespace_of
from services.scheduler.cache.kv_rows import RowBudget
from shared import limits
from shared.configuration.settings import CacheConfig
from shared.errors import ConfigError
from shared.messages import RankReady


@dataclasses.dataclass(frozen=True, slots=True)
class BlockFormat:
    """The same for all ranks; bytes are those of the rank where they are most."""

    namespace: str
    block_tokens: int
    """Tokens of a whole block."""
    bytes_per_token: int
    checkpoint_bytes: int
    needs_checkpoints: bool
    """Rows begin from blocks only where there is a checkpoint too."""
    bytes_max: int
    """Memory for blocks and checkpoints per rank, as far as rows leave it."""
    ranks: int

    def block_bytes(self, tokens: int) -> int:
        """Return what a block of so many tokens takes."""
        return tokens * self.bytes_per_token


def make_block_format(
    config: CacheConfig, reports: Sequence[RankReady], budget: RowBudget
) -> BlockFormat | None:
    """Return what blocks are in a world, or None when it keeps none.

    Args:
        config: the operator's wishes.
        reports: of all ranks, in rank order.
        budget: memory of the poorest rank, for rows and blocks.

    Raises:
        ConfigError: no sequence can be as long as a block.
    """
    if not config.enabled or not all(report.kv_layout for report in reports):
        return None
    context = min(report.context_tokens_max for report in reports)
    if config.block_tokens > context:
        raise ConfigError(_misfit(config.block_tokens, context))
    # Blocks hold nothing of a draft model: another one finds the same blocks.
    model = reports[0].model_fingerprint.partition("+")[0]
    return BlockFormat(
        namespace=namespace_of(model, [one.kv_layout for one in reports], config.block_tokens),
        block_tokens=config.block_tokens,
        bytes_per_token=budget.bytes_per_token,
        checkpoint_bytes=budget.bytes_per_row,
        needs_checkpoints=any(report.needs_checkpoints for report in reports),
        bytes_max=min(config.resident_bytes_max or budget.bytes_max // 2, budget.bytes_max),
        ranks=len(reports),
    )


def _misfit(block_tokens: int, context: int) -> str:
    text = f"cache.block_tokens is {block_tokens}, but the model's context has {context} tokens: "
    if context >= limits.BLOCK_TOKENS_MIN:
        return f"{text}set it to {limits.BLOCK_TOKENS_MIN} up to {context}."
    return f"{text}set cache.enabled to false."
