"""What a request is told about its prefix: how much was found, in which tier, and why not more."""

from typing import Literal

from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.prefix_match import Match
from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from shared import limits
from shared.messages import CachedPrefix

Miss = Literal["", "new", "diverged", "evicted", "unreadable", "slow", "off"]


def explain(
    form: BlockFormat, blocks: SequenceBlocks, match: Match, reused_tokens: int
) -> CachedPrefix:
    """Return the report of an admission.

    Args:
        form: what a block is.
        blocks: the sequence.
        match: what was found of it.
        reused_tokens: how much of that is used.
    """
    prompt_tokens = len(blocks.request.prompt)
    reused = min(reused_tokens, prompt_tokens)
    stored = stored_part(blocks, reused)
    diverged_at = match.diverged_at
    if diverged_at is not None and not limits.BLOCK_TOKENS_MIN <= diverged_at < prompt_tokens:
        diverged_at = None
    return CachedPrefix(
        memory_tokens=reused - stored,
        stored_tokens=stored,
        diverged_at=diverged_at,
        miss=_miss(form, blocks, match, reused_tokens, diverged_at),
    )


def stored_part(blocks: SequenceBlocks, reused_tokens: int) -> int:
    """Return how many of the reused tokens were restored from SSD for this sequence."""
    first, last = blocks.restored
    return max(0, min(reused_tokens, last) - first)


def _miss(
    form: BlockFormat,
    blocks: SequenceBlocks,
    match: Match,
    reused_tokens: int,
    diverged_at: int | None,
) -> Miss:
    useful = len(blocks.tokens) - 1
    if reused_tokens >= useful:
        return ""
    if blocks.restore_miss:
        return blocks.restore_miss
    shared = min(match.shared_tokens, useful)
    if shared < limits.BLOCK_TOKENS_MIN:
        return "new"
    resident = match.whole_blocks * form.block_tokens
    if shared - max(reused_tokens, resident) >= form.block_tokens:
        return "evicted"
    if diverged_at is not None:
        return "diverged"
    # Its blocks are there: what has gone is a checkpoint at their end.
    return "evicted" if shared - reused_tokens >= 2 * form.block_tokens else ""
