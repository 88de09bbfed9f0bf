"""Computing the KV of known tokens: chunks one by one, short prompts together."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.batch.prefill_groups import group_chunks, padded_width
from services.rank_worker.batch.running_batch import RunningSequence, SequenceBatch
from services.rank_worker.batch.step_parts import Forwards
from services.rank_worker.device.execution_profile import ExecutionProfile
from services.rank_worker.kv_cache.rows import KVStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.model.sharding.local_experts import may_wait
from services.rank_worker.speculation.proposer import RankProposer
from shared.errors import InvariantBroken
from shared.messages import PrefillChunk


class PrefillExecutor:
    """The prefill of a step. Each forward is started by itself, as soon as it is built."""

    def __init__(
        self,
        store: KVStore,
        forward: Forward,
        batch: SequenceBatch,
        proposer: RankProposer,
        use: ExecutionProfile,
    ) -> None:
        """Start.

        Args:
            store: KV of all rows.
            forward: the model.
            batch: whose rows they are.
            proposer: takes in what is computed.
            use: says whether forwards are shared and padded, where that is safe.
        """
        self._store = store
        self._forward = forward
        self._batch = batch
        self._proposer = proposer
        can_pad = store.can_pad and forward.narrows
        self._groups = use.groups_prefill and can_pad
        self._pads = use.pads_prefill and can_pad

    def run(self, chunks: Sequence[PrefillChunk], forwards: Forwards) -> None:
        """Build and start the forwards of a plan's chunks.

        Raises:
            InvariantBroken: a chunk does not go on where its row ends.
        """
        with may_wait():
            for group in self._grouped(chunks, self._store.row_tokens):
                if len(group) == 1:
                    self._run_one(group[0], forwards)
                else:
                    self._run_together(group, forwards)

    def waits(self, chunks: Sequence[PrefillChunk], row_tokens: int) -> bool:
        """Tell whether `run` waits for the device, and so for all steps before.

        Args:
            chunks: of a plan.
            row_tokens: tokens that its rows have room for.
        """
        least = self._forward.wait_tokens
        if least is None:
            return False
        # Groups are longest first, and as wide as that.
        return any(
            len(group) * self._width(group[0], row_tokens) >= least
            for group in self._grouped(chunks, row_tokens)
        )

    def _grouped(self, chunks: Sequence[PrefillChunk], row_tokens: int) -> list[list[PrefillChunk]]:
        if not self._groups:
            return [[one] for one in chunks]
        return group_chunks(chunks, lambda one: self._width(one, row_tokens))

    def _run_one(self, chunk: PrefillChunk, forwards: Forwards) -> None:
        sequence = self._check(chunk)
        slot, start, stop = sequence.slot, chunk.start, chunk.start + chunk.length
        if chunk.samples and self._forward.splits(chunk.length):
            tokens = mx.array(sequence.tokens[start : stop - 1])[None]
            self._forward.fill(tokens, self._store.prefill(slot, chunk.length - 1))
            forwards.fill(self._store.marker())
            start = stop - 1
        padding = self._width(chunk, self._store.row_tokens) - chunk.length
        columns = stop - start + padding
        tokens = _padded([sequence.tokens[start:stop]], columns)
        caches = self._store.prefill(slot, stop - start, columns)
        if not chunk.samples:
            self._forward.fill(tokens, caches)
            forwards.fill(self._store.marker())
        elif padding:
            ends = mx.array([stop - start - 1], dtype=mx.int32)
            logits = self._forward.ends_logits(tokens, caches, ends)
            forwards.add(logits, [chunk.sequence_id])
        else:
            forwards.add(self._forward.last_logits(tokens, caches), [chunk.sequence_id])
        self._proposer.prefilled([(sequence, start, stop)], self._forward.hidden, forwards)

    def _run_together(self, group: Sequence[PrefillChunk], forwards: Forwards) -> None:
        sequences = [self._check(chunk) for chunk in group]
        lengths = [chunk.length for chunk in group]
        width = self._width(group[0], self._store.row_tokens)
        tokens = _padded([sequence.tokens for sequence in sequences], width)
        slots = [sequence.slot for sequence in sequences]
        caches = self._store.prefill_together(slots, lengths, width)
        ends = mx.array(lengths, dtype=mx.int32) - 1
        logits = self._forward.ends_logits(tokens, caches, ends)
        forwards.add(logits, [chunk.sequence_id for chunk in group])
        rows = [(one, 0, length) for one, length in zip(sequences, lengths, strict=True)]
        self._proposer.prefilled(rows, self._forward.hidden, forwards)

    def _width(self, chunk: PrefillChunk, row_tokens: int) -> int:
        """Return the columns of a forward whose longest chunk this is."""
        if not self._pads:
            return chunk.length
        width = padded_width(chunk.length)
        return width if chunk.start + width <= row_tokens else chunk.length

    def _check(self, chunk: PrefillChunk) -> RunningSequence:
        sequence = self._batch.settled(chunk.sequence_id)
        length, known = self._store.length(sequence.slot), len(sequence.tokens)
        stop = chunk.start + chunk.length
        if chunk.start != length or stop > known or chunk.samples != (stop == known):
            raise InvariantBroken(
                f"chunk [{chunk.start}, {stop}) samples={chunk.samples} of sequence "
                f"{chunk.sequence_id}: its row holds {length} of {known} known tokens"
            )
        return sequence


def _padded(rows: Sequence[np.ndarray], columns: int) -> mx.array:
    """Return token ids as int32 [rows, columns], padded on the right."""
    padded = np.zeros((len(rows), columns), dtype=np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return mx.array(padded)
