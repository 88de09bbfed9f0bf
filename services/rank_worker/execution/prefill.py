"""Prefill of a step: computes the KV of known tokens, one or several chunks in a forward.

Owns no rows; `KVStore` does. L is the number of tokens in a chunk.
"""

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.batch.prefill_groups import (
    PrefillForward,
    concatenate_groups,
    group_chunks,
    padded_width,
)
from services.rank_worker.batch.running_batch import RunningSequence, SequenceBatch, pad_tokens
from services.rank_worker.batch.step_outputs import ForwardOutputs
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.model.sharding.local_experts import allow_device_wait
from services.rank_worker.speculation.proposer import RankProposer
from shared import limits
from shared.errors import InvariantBroken
from shared.messages import PrefillChunk

IN_PLACE_PAIRS_MAX = 1 << 21
"""Most pairs of a new token and one that it attends to, of a forward whose chunks kernels write in
place: those of a prompt of 2,048 tokens. Above it MLX's faster attention saves more than the host's
extra work for each chunk costs; of several forwards above half of it, as the device computes one
while the host works on the next."""
IN_PLACE_STOP_MAX = 8_192
"""Last token of such a chunk in its prompt: a group of threads reads all keys before it in turn."""


class PrefillExecutor:
    """Builds the prefills of a step and starts each forward as soon as it is built."""

    def __init__(
        self,
        store: KVStore,
        forward: Forward,
        batch: SequenceBatch,
        proposer: RankProposer,
        profile: ExecutionProfile,
    ) -> None:
        """Set up the prefill of one rank.

        Args:
            store: KV of all rows.
            forward: the model.
            batch: the running sequences.
            proposer: gets the hidden states, for drafts.
            profile: longest prompt that shares a forward, and whether chunks are padded; used only
                where the model allows it.
        """
        self._store = store
        self._forward = forward
        self._batch = batch
        self._proposer = proposer
        can_pad = store.can_pad and forward.can_select
        self._grouped_tokens_max = profile.grouped_tokens_max if can_pad else 0
        self._pads_chunks = profile.pads_prefill and can_pad

    @property
    def shares_forwards(self) -> bool:
        """Whether several prompts may share a forward."""
        return self._grouped_tokens_max > 0

    def run(self, chunks: Sequence[PrefillChunk], forwards: ForwardOutputs) -> None:
        """Build and start the forwards of a plan's prefill chunks.

        Args:
            chunks: prefill chunks of the plan; those that end a prompt are sampled.
            forwards: gets the logits of chunks that are sampled, and a marker for each forward
                without sampling: a small array whose evaluation runs the forward.

        Raises:
            InvariantBroken: a chunk does not start where its row ends.
        """
        with allow_device_wait():
            for arranged in self._arrange(chunks, self._store.row_tokens):
                if arranged.kind != "in place" and len(arranged.chunks) == 1:
                    self._run_single(arranged.chunks[0], forwards)
                elif arranged.kind == "rows":
                    self._run_group(arranged.chunks, forwards)
                else:
                    self._run_concatenated(arranged, forwards)

    def waits_for_earlier_steps(self, chunks: Sequence[PrefillChunk], row_tokens: int) -> bool:
        """Tell whether `run` waits for the device, or MLX uses rows that kernels write in place.

        Args:
            chunks: prefill chunks of a plan.
            row_tokens: capacity of each row in tokens under this plan.
        """
        arranged = self._arrange(chunks, row_tokens)
        if not arranged or arranged[0].kind == "in place":
            return False
        return self._store.writes_in_place or any(
            self._waits_for_device(one, row_tokens) for one in arranged
        )

    def _waits_for_device(self, arranged: PrefillForward, row_tokens: int) -> bool:
        """Tell whether a forward, not one in place, waits for the device while it is built."""
        chunks, rows = arranged.chunks, 1
        if arranged.kind == "rows":
            chunks, rows = chunks[:1], len(chunks)
        widths = [self._width(one, row_tokens) for one in chunks]
        tokens_min = self._forward.device_wait_tokens
        if tokens_min is not None and rows * sum(widths) >= tokens_min:
            return True
        return any(
            self._store.copies_wait_for_device(rows, one.start + width, width)
            for one, width in zip(chunks, widths, strict=True)
        )

    def _arrange(self, chunks: Sequence[PrefillChunk], row_tokens: int) -> list[PrefillForward]:
        """Return the forwards over the prefill chunks of a plan with rows of this capacity.

        Either all of them write rows in place or none: if MLX and kernels used the same rows in one
        plan, MLX would copy them.
        """

        def width(chunk: PrefillChunk) -> int:
            return self._width(chunk, row_tokens)

        in_place = self._arrange_in_place(chunks)
        if in_place:
            return in_place
        groups = group_chunks(chunks, self._grouped_tokens_max, width)
        if self._store.can_concatenate and self.shares_forwards:
            return concatenate_groups(groups, width)
        return [PrefillForward(one, "rows") for one in groups]

    def _arrange_in_place(self, chunks: Sequence[PrefillChunk]) -> list[PrefillForward]:
        """Return the forwards over these chunks if kernels write their rows, see `InPlaceView`.

        Plans whose hidden states a drafter reads use MLX, which writes rows of its own for them.

        Returns:
            As `_arrange`; empty if MLX writes the rows.
        """
        may = self._store.prefills_in_place and self._pads_chunks
        ends_late = any(one.start + one.length > IN_PLACE_STOP_MAX for one in chunks)
        if not may or self._forward.keeps_hidden or ends_late:
            return []
        # A forward that waits for the device cannot be compiled.
        waits = self._forward.device_wait_tokens
        tokens_max = limits.FORWARD_TOKENS_MAX if waits is None else waits - 1
        arranged = concatenate_groups(group_chunks(chunks, 0), lambda one: one.length)
        pairs_max = IN_PLACE_PAIRS_MAX // (2 if len(arranged) > 1 else 1)
        for forward in arranged:
            tokens = sum(one.length for one in forward.chunks)
            pairs = sum(one.length * (one.start + one.length // 2) for one in forward.chunks)
            if padded_width(tokens) > tokens_max or pairs > pairs_max:
                return []
        return [PrefillForward(one.chunks, "in place") for one in arranged]

    def _run_single(self, chunk: PrefillChunk, forwards: ForwardOutputs) -> None:
        if chunk.samples and self._forward.splits_last_chunk(chunk.length):
            self._run_last_token_apart(chunk, forwards)
            return
        sequence = self._check(chunk)
        start, stop = chunk.start, chunk.start + chunk.length
        width = self._width(chunk, self._store.row_tokens)
        is_padded = width > chunk.length
        tokens = pad_tokens([sequence.tokens[start:stop]], width)
        caches = self._store.prefill(sequence.slot, chunk.length, width)
        if not chunk.samples:
            real = _real([chunk.length], [width]) if is_padded else None
            self._forward.fill_caches(tokens, caches, real)
            forwards.start_fill(self._store.marker())
        elif is_padded:
            ends = mx.array([chunk.length - 1], dtype=mx.int32)
            logits = self._forward.row_end_logits(tokens, caches, ends)
            forwards.start_prefill(logits, [chunk.sequence_id])
        else:
            forwards.start_prefill(self._forward.last_logits(tokens, caches), [chunk.sequence_id])
        self._proposer.on_prefill([(sequence, start, stop)], self._forward.hidden, forwards)

    def _run_last_token_apart(self, chunk: PrefillChunk, forwards: ForwardOutputs) -> None:
        """Build a chunk in two forwards, as logits of one position alone cannot be computed.

        Chunks of such models are never padded, and no drafter reads their hidden states.
        """
        sequence = self._check(chunk)
        slot, last = sequence.slot, chunk.start + chunk.length - 1
        tokens = mx.array(sequence.tokens[chunk.start : last + 1])[None]
        self._forward.fill_caches(tokens[:, :-1], self._store.prefill(slot, chunk.length - 1))
        forwards.start_fill(self._store.marker())
        logits = self._forward.last_logits(tokens[:, -1:], self._store.prefill(slot, 1))
        forwards.start_prefill(logits, [chunk.sequence_id])

    def _run_group(self, group: Sequence[PrefillChunk], forwards: ForwardOutputs) -> None:
        width = self._width(group[0], self._store.row_tokens)
        # In the order of the rows, of which adjacent ones are written at once.
        checked = sorted(((self._check(one), one) for one in group), key=lambda pair: pair[0].slot)
        sequences = [sequence for sequence, _ in checked]
        lengths = [chunk.length for _, chunk in checked]
        tokens = pad_tokens([sequence.tokens for sequence in sequences], width)
        slots = [sequence.slot for sequence in sequences]
        caches = self._store.prefill_padded(slots, lengths, width)
        ends = mx.array(lengths, dtype=mx.int32) - 1
        logits = self._forward.row_end_logits(tokens, caches, ends)
        forwards.start_prefill(logits, [chunk.sequence_id for _, chunk in checked])
        rows = [(sequence, 0, length) for sequence, length in zip(sequences, lengths, strict=True)]
        self._proposer.on_prefill(rows, self._forward.hidden, forwards)

    def _run_concatenated(self, arranged: PrefillForward, forwards: ForwardOutputs) -> None:
        """Build a forward over chunks side by side, also in place."""
        chunks, in_place = arranged.chunks, arranged.kind == "in place"
        sequences = [self._check(one) for one in chunks]
        lengths = [one.length for one in chunks]
        widths = [self._width(one, self._store.row_tokens) for one in chunks]
        if in_place:
            widths = [*lengths[:-1], lengths[-1] + padded_width(sum(lengths)) - sum(lengths)]
        *firsts, total = itertools.accumulate(widths, initial=0)
        parts = list(zip(sequences, chunks, firsts, strict=True))
        tokens = np.zeros((1, total), dtype=np.int32)
        for sequence, chunk, first in parts:
            stop = chunk.start + chunk.length
            tokens[0, first : first + chunk.length] = sequence.tokens[chunk.start : stop]
        slots = [sequence.slot for sequence in sequences]
        store = self._store
        prefill = store.prefill_in_place if in_place else store.prefill_concatenated
        caches = prefill(slots, lengths, widths)
        real = _real(lengths, widths)
        ends = {one.sequence_id: first + one.length - 1 for _, one, first in parts if one.samples}
        if ends:
            wanted = list(ends.values())
            logits = self._forward.selected_logits(mx.array(tokens), caches, wanted, real)
            # In place all tokens are computed in one operation, on which all logits depend.
            needs_marker = len(ends) < len(chunks) and not in_place
            marker = store.marker() if needs_marker else None
            forwards.start_prefill(logits, list(ends), marker)
        elif in_place:
            # MLX knows of no other result of a forward that writes rows in place.
            logits = self._forward.selected_logits(mx.array(tokens), caches, [total - 1], real)
            forwards.start_fill(logits[:, :1])
        else:
            self._forward.fill_caches(mx.array(tokens), caches, real)
            forwards.start_fill(store.marker())
        hidden = self._forward.hidden
        for sequence, chunk, first in parts:
            own = None if hidden is None else hidden[:, first : first + chunk.length]
            read = (sequence, chunk.start, chunk.start + chunk.length)
            self._proposer.on_prefill([read], own, forwards)

    def _width(self, chunk: PrefillChunk, row_tokens: int) -> int:
        """Return the width of a forward whose longest chunk is this one."""
        if not self._pads_chunks:
            return chunk.length
        width = padded_width(chunk.length)
        return width if chunk.start + width <= row_tokens else chunk.length

    def _check(self, chunk: PrefillChunk) -> RunningSequence:
        sequence = self._batch.find_verified(chunk.sequence_id)
        length, known = self._store.length(sequence.slot), len(sequence.tokens)
        stop = chunk.start + chunk.length
        if chunk.start != length or stop > known or chunk.samples != (stop == known):
            raise InvariantBroken(
                f"prefill chunk [{chunk.start}, {stop}), samples={chunk.samples}, does not extend "
                f"sequence {chunk.sequence_id}: its row holds {length} of {known} tokens"
            )
        return sequence


def _real(lengths: Sequence[int], widths: Sequence[int]) -> mx.array:
    """Return bool [1, sum of widths], false for padding of chunks side by side."""
    parts = [np.arange(width) < length for length, width in zip(lengths, widths, strict=True)]
    return mx.array(np.concatenate(parts))[None]
