"""Admission: what a sequence reuses, and whether it is worth while to wait for more.

A sequence waits for a restore of its own, or for what others compute or restore at the moment and
it will reuse; those behind it in the queue may pass.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex
from services.scheduler.cache.index.hashes import Chain, root_hash
from services.scheduler.cache.index.prefix_match import Match, find_match
from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from services.scheduler.cache.pending_blocks import PendingBlocks
from services.scheduler.cache.pins import BlockPins
from services.scheduler.cache.report import explain, stored_part
from services.scheduler.cache.restorer import RestoreDecision, Restorer

_SHORT_REUSE_TOKENS = 64
"""A prompt that shares less than this, not one whole block and not half of itself, is computed
whole: ranks then compute it together with others of its length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reuse:
    """With what a row begins."""

    tokens: int = 0
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    checkpoint: bytes | None = None


class Admission:
    """Looks sequences up."""

    def __init__(
        self,
        index: BlockIndex,
        pins: BlockPins,
        claims: PendingBlocks,
        restoring: Restorer,
        counters: defaultdict[str, float],
    ) -> None:
        self._index = index
        self._pins = pins
        self._claims = claims
        self._restoring = restoring
        self._counters = counters

    def must_wait(
        self,
        form: BlockFormat,
        epoch: int,
        blocks: SequenceBlocks,
        now_s: float,
        token_ms: Callable[[int], float],
        *,
        may_evict: bool,
    ) -> bool:
        """Tell whether a sequence shall not be admitted yet; ask for a restore when worth while.

        Args:
            form: what a block is.
            epoch: of the ranks.
            blocks: the sequence.
            now_s: the time.
            token_ms: predicted milliseconds to compute a token at a place in a prompt.
            may_evict: a plan is in the making, which can carry evictions.
        """
        if blocks.epoch != epoch:
            self._begin_waiting(form, epoch, blocks)
        if blocks.restore_id is not None:
            return True
        if blocks.waits_for is not None:
            if blocks.waits_for in self._claims or blocks.waits_for in self._restoring:
                return True
            blocks.waits_for = None
        if self._restoring.must_queue(blocks, now_s):
            return True
        if blocks.looked_at == (self._index.version, self._claims.version):
            return False
        match = self._look(form, blocks)
        blocks.found_tokens = match.tokens
        blocks.waits_for = self._awaited(form, blocks, match)
        if blocks.waits_for is not None:
            return True
        if match.path:
            self._index.touch(match.path[-1], match.checkpoint)
        asked = self._restoring.ask(
            form, epoch, blocks, match, now_s, token_ms, may_evict=may_evict
        )
        if asked is RestoreDecision.NO:
            blocks.looked_at = self._index.version, self._claims.version
        return asked is not RestoreDecision.NO

    def admit(self, form: BlockFormat, blocks: SequenceBlocks) -> Reuse:
        """Return what the row begins with; the plan in the making relies on it."""
        match = self._look(form, blocks)
        tokens = match.tokens
        if (
            not match.whole_blocks
            and tokens < _SHORT_REUSE_TOKENS
            and 2 * tokens < len(blocks.tokens)
        ):
            tokens = 0
        self._pins.release(("waiting", blocks.sequence_id))
        reuse = Reuse()
        if tokens:
            last, state = match.path[-1], match.checkpoint
            held = [last.block] if state is None else [last.block, state]
            self._pins.hold(("plan", blocks.sequence_id), *held)
            self._index.touch(last, state)
            if state is not None:
                # It is not only its owner's any more.
                state.owner = 0
            names = [node.hash for node in match.path]
            reuse = Reuse(tokens, names, state.hash if state is not None else None)
        self._plan_keeping(form, blocks, match, tokens)
        cached = explain(form, blocks, match, tokens)
        blocks.cached = blocks.cached or cached
        stored = stored_part(blocks, tokens)
        self._counters["cache_hit_tokens_memory_total"] += tokens - stored
        self._counters["cache_hit_tokens_ssd_total"] += stored
        missed = f"cache_miss_tokens_{cached.miss or 'end'}_total"
        self._counters[missed] += len(blocks.tokens) - tokens
        return reuse

    def _begin_waiting(self, form: BlockFormat, epoch: int, blocks: SequenceBlocks) -> None:
        root = root_hash(form.namespace, blocks.request.cache_salt)
        chain = blocks.chain
        if chain is None or chain.root != root:
            chain = Chain(root, form.block_tokens, blocks.tokens)
        blocks.begin_waiting(epoch, chain)

    def _look(self, form: BlockFormat, blocks: SequenceBlocks) -> Match:
        assert blocks.chain is not None
        blocks.chain.extend()
        return find_match(
            self._index,
            blocks.chain,
            blocks.tokens,
            needs_checkpoints=form.needs_checkpoints,
        )

    def _awaited(self, form: BlockFormat, blocks: SequenceBlocks, match: Match) -> bytes | None:
        """Return what somebody computes or reads now that this sequence will reuse."""
        assert blocks.chain is not None
        first, useful = match.whole_blocks, len(blocks.tokens) - 1
        if form.needs_checkpoints:
            first = match.tokens // form.block_tokens
            names = blocks.chain.hashes[first : useful // form.block_tokens]
        else:
            goes_on = first * form.block_tokens < useful
            names = blocks.chain.hashes[first : first + goes_on]
        for name in reversed(names):
            if name in self._claims or name in self._restoring:
                return name
        return None

    def _plan_keeping(
        self, form: BlockFormat, blocks: SequenceBlocks, match: Match, tokens: int
    ) -> None:
        """Note which blocks the row will bring, and where its state is to be set aside."""
        assert blocks.chain is not None
        hashes, size = blocks.chain.hashes, form.block_tokens
        blocks.stop_running()
        blocks.handled = tokens // size
        blocks.border = (blocks.handled + 1) * size
        if not form.needs_checkpoints:
            first = match.whole_blocks
            wanted = [((first + n + 1) * size, name) for n, name in enumerate(hashes[first:])]
        else:
            if form.checkpoint_bytes <= form.bytes_max:
                places = [blocks.system_tokens, *blocks.request.borders, len(blocks.tokens)]
                borders = {min(place, len(blocks.tokens)) // size * size for place in places}
                blocks.cuts.extend(sorted(border for border in borders if border > tokens))
            wanted = [(end, hashes[end // size - 1]) for end in blocks.cuts]
        self._claims.claim(blocks, wanted)
