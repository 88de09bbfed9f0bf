"""Drafts from a smaller model with the same tokenizer, which every rank runs whole.

Its rows hold the same tokens as the model's rows and are moved and rolled back with them. So k
drafts take k + 1 forwards: the last one only reads the last draft. Source: Leviathan, Kalman,
Matias, "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx
from mlx import nn

from services.rank_worker.batch.prefill_groups import group_chunks
from services.rank_worker.batch.running_batch import RunningSequence, last_tokens, pad_tokens
from services.rank_worker.batch.step_outputs import ForwardOutputs
from services.rank_worker.device.execution_profile import GROUPED_TOKENS_MAX
from services.rank_worker.kv_cache.rows.kv_shapes import read_shape
from services.rank_worker.kv_cache.rows.store_choice import open_store
from services.rank_worker.model.forward import Forward
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.sampler import Sampler, SynchronizeIds
from services.rank_worker.speculation.draft_builder import DraftBuilder, gather_input_rows
from services.rank_worker.speculation.proposer import DrafterWithRows
from shared.errors import ConfigError, InvariantBroken
from shared.messages import DraftChunk, PrefillChunk


class DraftModelProposer(DrafterWithRows):
    """Proposes drafts with a draft model, a smaller model that has rows of its own."""

    needs_chunks: ClassVar[bool] = True

    def __init__(self, model: nn.Module, sampler: Sampler, synchronize: SynchronizeIds) -> None:
        """Read the model's shape; nothing is computed.

        Args:
            model: draft model, loaded whole.
            sampler: samples the drafts, and the tokens that they are compared with.
            synchronize: makes drafts equal on all ranks.

        Raises:
            ConfigError: its rows cannot be rolled back.
        """
        model.eval()
        shape = read_shape(model)
        super().__init__(open_store(model, shape), sampler, synchronize)
        if not self._store.can_roll_back:
            raise ConfigError(
                f"speculation.draft_model: mlx-lm's {type(model).__module__} keeps state that "
                "cannot be rolled back when drafts are rejected: choose another draft model."
            )
        self._forward = Forward(model)
        self._vocab_size = shape.vocab_size

    def roll_back(self, sequence: RunningSequence, base_length: int, length: int) -> None:
        """Cut the draft model's row to the accepted tokens, unless it is shorter.

        Args:
            sequence: whose drafts were verified.
            base_length: not used.
            length: tokens that remain in the model's row; the draft model's row keeps at most as
                many.
        """
        del base_length
        if self._store.length(sequence.slot) > length:
            self._store.roll_back(sequence.slot, length)

    def read(
        self,
        chunks: Sequence[DraftChunk],
        sequences: Sequence[RunningSequence],
        forwards: ForwardOutputs,
    ) -> None:
        """Append known tokens to the draft model's rows.

        Starts the forwards without waiting for the results. Whole short texts of nearly the same
        length share a forward.

        Args:
            chunks: `draft_chunks` of the plan: token ids and the position of the first.
            sequences: the sequence of each chunk.
            forwards: gets one marker per forward: a small array whose evaluation runs the forward.

        Raises:
            InvariantBroken: a chunk does not start where its row ends.
        """
        # The index of a chunk in the plan serves as sequence id, so that two chunks of one sequence
        # stay apart and are read in order.
        prefill_chunks = [
            PrefillChunk(
                sequence_id=index, start=chunk.start, length=len(chunk.tokens), samples=True
            )
            for index, chunk in enumerate(chunks)
        ]
        are_distinct = len({chunk.sequence_id for chunk in chunks}) == len(chunks)
        groups = group_chunks(prefill_chunks, GROUPED_TOKENS_MAX if are_distinct else 0)
        for group in groups:
            # In the order of the rows, of which adjacent ones are written at once.
            indices = sorted(
                (chunk.sequence_id for chunk in group), key=lambda index: sequences[index].slot
            )
            slots = [sequences[index].slot for index in indices]
            lengths = [len(chunks[index].tokens) for index in indices]
            for index, slot in zip(indices, slots, strict=True):
                self._check(chunks[index], slot)
            tokens = pad_tokens([chunks[index].tokens for index in indices], max(lengths))
            self._forward.fill_caches(self._clip_ids(tokens), self._prefill(slots, lengths))
            forwards.start_marker(self._store.marker())

    def _check(self, chunk: DraftChunk, slot: int) -> None:
        length = self._store.length(slot)
        if chunk.start != length:
            raise InvariantBroken(
                f"draft chunk of {len(chunk.tokens)} tokens at {chunk.start} does not continue the "
                f"draft row of sequence {chunk.sequence_id}, which holds {length} tokens"
            )

    def propose(
        self,
        sequences: Sequence[RunningSequence],
        lengths: Sequence[int],
        counts: Sequence[int],
        forwards: ForwardOutputs,
    ) -> StepDrafts:
        """Build the drafts of a step: each forward of the draft model gives rows their next draft.

        Arguments and results are those of `RankProposer.propose`.
        """
        for sequence, length, count in zip(sequences, lengths, counts, strict=True):
            held = self._store.length(sequence.slot)
            if count >= 0 and held != length:
                raise InvariantBroken(
                    f"sequence {sequence.sequence_id} of {length} tokens is to get {count} drafts, "
                    f"but its draft row holds {held} tokens"
                )
        if max(counts) < 0:
            return StepDrafts({}, [])
        builder = DraftBuilder(sequences, lengths, counts)
        for draft_index in range(max(counts) + 1):
            rows = [row for row, count in enumerate(counts) if count >= draft_index]
            slots = [sequences[row].slot for row in rows]
            view = self._store.decode(slots, 1)
            if draft_index == 0:
                tokens = last_tokens([sequences[row] for row in rows], view.input_slots)
            else:
                # These rows are those that got a draft in the previous forward.
                tokens = gather_input_rows(builder.last_drafts, slots, view.input_slots)
            next_rows = builder.next_rows()
            tokens = self._clip_ids(tokens[:, None])
            if not next_rows:
                self._forward.fill_caches(tokens, view.caches)
                break
            input_rows = {slot: row for row, slot in enumerate(view.input_slots)}
            selected_rows = [input_rows[sequences[row].slot] for row in next_rows]
            selects_all = len(selected_rows) == len(view.input_slots)
            logits = self._forward.selected_logits(
                tokens, view.caches, None if selects_all else selected_rows
            )
            builder.sample_next(logits, self._sampler)
        forwards.markers.append(self._store.marker())
        return builder.build(self._synchronize)

    def _clip_ids(self, tokens: mx.array) -> mx.array:
        """Return ids, int32, below the draft model's vocabulary size; it may have less padding."""
        return mx.minimum(tokens, self._vocab_size - 1)
