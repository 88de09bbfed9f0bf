"""Reuse of blocks by waiting sequences. Owns the blocks that running sequences will compute.

A sequence waits for its own restore, or for blocks that it will reuse and that another sequence
computes or restores now. Sequences behind it may be admitted first.
"""

import dataclasses
from typing import Literal

from services.scheduler.cache.cache_state import CacheState
from services.scheduler.cache.index.hashes import Chain, root_hash
from services.scheduler.cache.index.prefix_match import Match, find_match
from services.scheduler.cache.index.sequence_blocks import UNREACHABLE_TOKENS, SequenceBlocks
from services.scheduler.cache.restorer import Restorer
from shared import limits
from shared.messages import CachedPrefix

_SHORT_REUSE_TOKENS = 64
"""A reuse below this length, one block and half of the sequence is skipped: ranks then prefill the
whole sequence together with others of its length."""

Miss = Literal["", "new", "diverged", "evicted", "unreadable", "slow", "off"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """The part of a row that ranks copy from blocks at admission."""

    tokens: int = 0
    """Number of leading tokens of the sequence that the row gets from blocks; 0: it starts
    empty."""
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    """The blocks in order; the last one may be used in part."""
    checkpoint: bytes | None = None
    """Hash of the checkpoint at `tokens`; None where rows need none."""


class PendingBlocks:
    """Blocks and checkpoints that running sequences will compute, and others can wait for.

    Every running sequence either computes its entries or leaves the batch. Both remove them here,
    so no wait lasts forever.
    """

    def __init__(self) -> None:
        self.version = 0
        """Changes whenever a wait may begin or end."""
        self._owners: dict[bytes, int] = {}

    def __contains__(self, entry_hash: bytes) -> bool:
        """Return True while a running sequence will compute this block or checkpoint."""
        return entry_hash in self._owners

    def add(self, blocks: SequenceBlocks, wanted: list[tuple[int, bytes]]) -> None:
        """Add the entries that a sequence will compute, except those that another one owns.

        Args:
            blocks: the record of the sequence, which becomes their owner.
            wanted: (end, hash) of each block or checkpoint, by rising end. The end is the length in
                tokens at which the sequence's row contains it.
        """
        for end, entry_hash in wanted:
            if self._owners.setdefault(entry_hash, blocks.sequence_id) == blocks.sequence_id:
                blocks.pending.append((end, entry_hash))
        self.version += 1

    def release(self, blocks: SequenceBlocks, until_tokens: int = UNREACHABLE_TOKENS) -> None:
        """Remove the entries that a sequence owns and that its row contains at a length.

        Args:
            blocks: the record of the sequence.
            until_tokens: that length in tokens; entries with a later end stay. By default all are
                removed, because the sequence will compute no more.
        """
        while blocks.pending and blocks.pending[0][0] <= until_tokens:
            _, entry_hash = blocks.pending.popleft()
            del self._owners[entry_hash]
            self.version += 1

    def clear(self) -> None:
        """Remove all entries at the end of an epoch."""
        self._owners.clear()
        self.version += 1

    def check_invariants(self, running: list[SequenceBlocks]) -> None:
        """Assert that the entries are exactly those that the records of running sequences list."""
        pending = {name: one.sequence_id for one in running for _, name in one.pending}
        assert pending == self._owners, (len(pending), len(self._owners))


class Admission:
    """Decides which waiting sequences are ready, and what the rows of admitted ones reuse."""

    def __init__(self, state: CacheState, restorer: Restorer) -> None:
        self._state = state
        self._restorer = restorer
        self.pending = PendingBlocks()

    def prepare(self, blocks: SequenceBlocks, now_s: float, *, may_evict: bool) -> bool:
        """Look up a waiting sequence's blocks, and request stored ones if that saves time.

        Args:
            blocks: the record of the waiting sequence.
            now_s: the scheduler's time in seconds, from which a restore's deadline counts.
            may_evict: a plan is being built, so blocks can be evicted to make room.

        Returns:
            True if the sequence can be admitted now, with the blocks that are resident. False if it
            waits for a restore, or for another sequence that computes the same blocks.
        """
        if not self._state.is_on:
            return True
        if blocks.epoch != self._state.epoch:
            self._reset(blocks)
        if blocks.restore_id is not None:
            return False
        if blocks.awaited_hash is not None and self._is_coming(blocks.awaited_hash):
            return False
        blocks.awaited_hash = None
        if self._restorer.must_queue(blocks, now_s):
            return False
        if blocks.ready_at_versions == self._versions:
            return True
        match = self._match(blocks)
        blocks.resident_tokens = match.tokens
        blocks.awaited_hash = self._find_awaited(blocks, match)
        if blocks.awaited_hash is not None:
            return False
        if match.path:
            self._state.index.touch(match.path[-1], match.checkpoint)
        if self._restorer.request(blocks, match, now_s, may_evict=may_evict):
            return False
        blocks.ready_at_versions = self._versions
        return True

    def admit(self, blocks: SequenceBlocks) -> Reuse:
        """Admit a sequence with the plan being built; return what its row reuses.

        The blocks it reuses cannot be evicted by that plan. Other sequences with the same prefix
        can wait for the blocks that it will compute.
        """
        if not self._state.is_on:
            blocks.cached = blocks.cached or CachedPrefix(miss="off")
            self._state.counters["cache_miss_tokens_off_total"] += len(blocks.tokens)
            return Reuse()
        match = self._match(blocks)
        tokens = match.tokens
        if (
            not match.whole_blocks
            and tokens < _SHORT_REUSE_TOKENS
            and 2 * tokens < len(blocks.tokens)
        ):
            tokens = 0
        self._state.pins.release(("waiting", blocks.sequence_id))
        reuse = Reuse()
        if tokens:
            last, checkpoint = match.path[-1], match.checkpoint
            held = [last.block] if checkpoint is None else [last.block, checkpoint]
            self._state.pins.hold(("plan", blocks.sequence_id), *held)
            self._state.index.touch(last, checkpoint)
            if checkpoint is not None:
                # Another sequence uses it now, so its owner may not supersede it.
                checkpoint.owner = 0
            hashes = [node.hash for node in match.path]
            reuse = Reuse(tokens, hashes, checkpoint.hash if checkpoint is not None else None)
        self._plan_keeping(blocks, match, tokens)
        self._report(blocks, match, tokens)
        return reuse

    @property
    def _versions(self) -> tuple[int, int]:
        return self._state.index.version, self.pending.version

    def _is_coming(self, entry_hash: bytes) -> bool:
        return entry_hash in self.pending or entry_hash in self._restorer

    def _reset(self, blocks: SequenceBlocks) -> None:
        block_format, chain = self._state.block_format, blocks.chain
        root = root_hash(block_format.namespace, blocks.request.cache_salt)
        if chain.root != root:
            chain = Chain(root, block_format.block_tokens, blocks.tokens)
        blocks.reset(self._state.epoch, chain)

    def _match(self, blocks: SequenceBlocks) -> Match:
        blocks.chain.extend()
        return find_match(
            self._state.index,
            blocks.chain,
            blocks.tokens,
            needs_checkpoints=self._state.block_format.needs_checkpoints,
            grid_tokens=self._state.grid_tokens,
        )

    def _find_awaited(self, blocks: SequenceBlocks, match: Match) -> bytes | None:
        """Return the entry to wait for: the last one that is computed or restored now."""
        block_format = self._state.block_format
        first, usable_tokens = match.whole_blocks, len(blocks.tokens) - 1
        if block_format.needs_checkpoints:
            first = match.tokens // block_format.block_tokens
            hashes = blocks.chain.hashes[first : usable_tokens // block_format.block_tokens]
        else:
            has_next = first * block_format.block_tokens < usable_tokens
            hashes = blocks.chain.hashes[first : first + has_next]
        return next((one for one in reversed(hashes) if self._is_coming(one)), None)

    def _plan_keeping(self, blocks: SequenceBlocks, match: Match, tokens: int) -> None:
        """Set which blocks the row will complete and where prefill stops for snapshots."""
        block_format, hashes = self._state.block_format, blocks.chain.hashes
        size = block_format.block_tokens
        blocks.reset_row()
        blocks.settled_blocks = tokens // size
        blocks.next_boundary = (blocks.settled_blocks + 1) * size
        if not block_format.needs_checkpoints:
            first = match.whole_blocks
            last = self._state.kept_tokens_max(blocks) // size
            wanted = [((first + n + 1) * size, name) for n, name in enumerate(hashes[first:last])]
        else:
            if block_format.checkpoint_bytes <= block_format.bytes_max:
                lengths = [
                    blocks.request.system_tokens,
                    *blocks.request.cache_boundaries,
                    len(blocks.tokens),
                ]
                stops = {min(length, len(blocks.tokens)) // size * size for length in lengths}
                blocks.snapshot_stops.extend(sorted(stop for stop in stops if stop > tokens))
            wanted = [(end, hashes[end // size - 1]) for end in blocks.snapshot_stops]
        self.pending.add(blocks, wanted)

    def _report(self, blocks: SequenceBlocks, match: Match, tokens: int) -> None:
        """Count the reused tokens, and describe a first admission to the client."""
        cached = explain_reuse(self._state.block_format.block_tokens, blocks, match, tokens)
        blocks.cached = blocks.cached or cached
        stored = _stored_tokens(blocks, tokens)
        counters = self._state.counters
        counters["cache_hit_tokens_memory_total"] += tokens - stored
        counters["cache_hit_tokens_ssd_total"] += stored
        missed = f"cache_miss_tokens_{cached.miss or 'end'}_total"
        counters[missed] += len(blocks.tokens) - tokens


def explain_reuse(
    block_tokens: int, blocks: SequenceBlocks, match: Match, reused_tokens: int
) -> CachedPrefix:
    """Describe to the client how much of a prompt is reused, and why not more.

    Args:
        block_tokens: tokens per block.
        blocks: the record of the sequence.
        match: its prefix match.
        reused_tokens: leading tokens of the match that are reused.

    Returns:
        Prompt tokens reused from memory and from SSD, the position at which the most similar known
        sequence differs, and the cause of the miss after them.
    """
    prompt_tokens = blocks.prompt_tokens
    reused = min(reused_tokens, prompt_tokens)
    stored = _stored_tokens(blocks, reused)
    diverged_at = match.diverged_at
    if diverged_at is not None and not limits.BLOCK_TOKENS_MIN <= diverged_at < prompt_tokens:
        diverged_at = None
    return CachedPrefix(
        memory_tokens=reused - stored,
        stored_tokens=stored,
        diverged_at=diverged_at,
        miss=_miss(block_tokens, blocks, match, reused_tokens, diverged_at),
    )


def _stored_tokens(blocks: SequenceBlocks, reused_tokens: int) -> int:
    """Return how many of the reused tokens were restored from SSD for this sequence."""
    first, last = blocks.restored_range
    return max(0, min(reused_tokens, last) - first)


def _miss(
    block_tokens: int,
    blocks: SequenceBlocks,
    match: Match,
    reused_tokens: int,
    diverged_at: int | None,
) -> Miss:
    usable_tokens = len(blocks.tokens) - 1
    if reused_tokens >= usable_tokens:
        return ""
    if blocks.restore_miss:
        return blocks.restore_miss
    shared = min(match.shared_tokens, usable_tokens)
    if shared < limits.BLOCK_TOKENS_MIN:
        return "new"
    resident_tokens = match.whole_blocks * block_tokens
    if shared - max(reused_tokens, resident_tokens) >= block_tokens:
        return "evicted"
    if diverged_at is not None:
        return "diverged"
    # The blocks are resident; only a checkpoint at their end was evicted.
    return "evicted" if shared - reused_tokens >= 2 * block_tokens else ""
