"""Drafts from an EAGLE head over the model's hidden states, which every rank runs whole.

A row of the head has one entry per token whose hidden state was computed, made of true hidden
states only. Entries that a step adds while it drafts are dropped with the step, because its
verification gives the true hidden states; the next step first appends those, and then drafts.
Hidden states of steps without drafts are kept for a while and appended later. Entries are missing
where hidden states are unknown (tokens from blocks) or too old: positions are relative, and drafts
change the number of tokens per step, never the tokens.

Shapes: B rows, L tokens per row, H numbers per hidden state, V token ids in the vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.batch.running_batch import (
    ElementGather,
    RunningSequence,
    TokenReference,
    pad_tokens,
)
from services.rank_worker.batch.step_outputs import ForwardOutputs
from services.rank_worker.kv_cache.rows.row_store import RowStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.sampler import Sampler, SynchronizeIds
from services.rank_worker.speculation.draft_builder import DraftBuilder, gather_input_rows
from services.rank_worker.speculation.eagle_head import EagleHead
from services.rank_worker.speculation.proposer import DrafterWithRows
from shared import limits
from shared.errors import ConfigError, InvariantBroken

PENDING_STATES_MAX = 64
"""Hidden states kept per sequence, roughly: drafting that stopped can resume within this many
tokens without a gap."""

ROW_PADDING_TOKENS = PENDING_STATES_MAX + limits.DRAFT_TOKENS_MAX + 1
"""Columns of a row beyond its tokens, for the padding of rows that catch up in one forward."""


@dataclasses.dataclass(slots=True)
class PendingHidden:
    """Hidden states of one sequence from one step, until they are appended to the head's row."""

    hidden: mx.array
    """[B, L, H], computed by the forward of that step."""
    start: int
    """Index of the first one among the B * L of `hidden`."""
    count: int = 1
    """Number of hidden states from there on."""
    next_token: TokenReference | None = None
    """The token after the last of them; None: the last token of the sequence."""


class EagleProposer(DrafterWithRows):
    """Proposes drafts with an EAGLE head, which has rows of its own."""

    def __init__(
        self, head: EagleHead, forward: Forward, sampler: Sampler, synchronize: SynchronizeIds
    ) -> None:
        """Make the model's forwards keep their hidden states; nothing is computed.

        Args:
            head: loaded.
            forward: the model, whose embeddings and output head are used.
            sampler: samples the drafts, and the tokens that they are compared with.
            synchronize: makes drafts equal on all ranks.

        Raises:
            ConfigError: the model's hidden states are not accessible, or have another width than
                the head's.
        """
        if not (forward.hidden_dim and forward.can_embed):
            raise ConfigError(
                "speculation.method: no EAGLE head can use this model, because its embeddings and "
                "output head cannot be called without its layers: choose another method."
            )
        if head.width != forward.hidden_dim:
            raise ConfigError(
                f"speculation.draft_model: the EAGLE head was trained for hidden states of "
                f"{head.width} numbers, but this model's have {forward.hidden_dim}: choose a "
                "head for this model."
            )
        head.set_dtype(forward.hidden_dtype)
        head.eval()
        forward.keeps_hidden = True
        self._head = head
        self._forward = forward
        super().__init__(RowStore(head.layer_parts()), sampler, synchronize)
        self.bytes_per_row = ROW_PADDING_TOKENS * self.bytes_per_token
        self._pending: dict[int, list[PendingHidden]] = {}
        """By sequence id, oldest first."""

    def resize(self, row_count: int, row_tokens: int) -> None:
        """Set the number of the head's rows and the capacity of each.

        Args:
            row_count: number of rows.
            row_tokens: tokens that each row can hold; padding is added to it. 0 frees the rows.
        """
        super().resize(row_count, row_tokens + ROW_PADDING_TOKENS if row_tokens else 0)

    def free(self, sequence: RunningSequence) -> None:
        """Empty the head's row of a sequence that leaves the batch; drop its kept hidden states."""
        super().free(sequence)
        self._pending.pop(sequence.sequence_id, None)

    def roll_back(self, sequence: RunningSequence, base_length: int, length: int) -> None:
        """Of the last decode's hidden states, keep those of its token and of the accepted drafts.

        Arguments and results are those of `RankProposer.roll_back`.
        """
        self._pending[sequence.sequence_id][-1].count = length - base_length

    def on_prefill(
        self,
        chunks: Sequence[tuple[RunningSequence, int, int]],
        hidden: mx.array | None,
        forwards: ForwardOutputs,
    ) -> None:
        """Append the hidden states of a prefill to the head's rows where the next token is known.

        The state before a token still to be sampled is kept for the next step.

        Args:
            chunks: (sequence, index of the chunk's first token, index after its last) of each row.
            hidden: [B, L, H] in the model's dtype; rows may be padded on the right.
            forwards: gets markers: small arrays whose evaluation runs the head and copies the last
                states.
        """
        assert hidden is not None
        next_tokens = [sequence.tokens[start + 1 : stop + 1] for sequence, start, stop in chunks]
        lengths = [len(tokens) for tokens in next_tokens]
        slots = [sequence.slot for sequence, _, _ in chunks]
        width = max(lengths)
        if width:
            embedded = self._forward.embed(pad_tokens(next_tokens, width))
            self._head(embedded, hidden[:, :width], self._prefill(slots, lengths))
            forwards.start_marker(self._store.marker())
        last_columns = mx.array([[stop - start - 1] for _, start, stop in chunks], dtype=mx.int32)
        # A copy, because a view would keep the hidden states of the whole prompt in memory.
        last_hidden = mx.take_along_axis(hidden, last_columns[:, :, None], axis=1)
        forwards.start_marker(last_hidden)
        for row, (sequence, _, stop) in enumerate(chunks):
            if stop == len(sequence.tokens):
                self._pending[sequence.sequence_id] = [PendingHidden(last_hidden, row)]

    def propose(
        self,
        sequences: Sequence[RunningSequence],
        lengths: Sequence[int],
        counts: Sequence[int],
        forwards: ForwardOutputs,
    ) -> StepDrafts:
        """Append the kept hidden states to the head's rows, then draft from the head's outputs.

        Arguments and results are those of `RankProposer.propose`.
        """
        builder = DraftBuilder(sequences, lengths, counts)
        caught_up = [row for row, count in enumerate(counts) if count >= 0]
        if not caught_up:
            return builder.build(self._synchronize)
        outputs = self._catch_up([sequences[row] for row in caught_up])
        row_lengths = {
            sequences[row].slot: self._store.length(sequences[row].slot) for row in caught_up
        }
        next_rows = builder.next_rows()
        if next_rows:
            row_numbers = {row: number for number, row in enumerate(caught_up)}
            hidden = outputs[mx.array([row_numbers[row] for row in next_rows], dtype=mx.int32)]
            builder.sample_next(self._logits(hidden), self._sampler, of_part=True)
        previous_rows = next_rows
        while next_rows := builder.next_rows():
            slots = [sequences[row].slot for row in next_rows]
            view = self._store.decode(slots, 1)
            previous_slots = [sequences[row].slot for row in previous_rows]
            tokens = gather_input_rows(builder.last_drafts, previous_slots, view.input_slots)
            hidden = gather_input_rows(hidden, previous_slots, view.input_slots)
            outputs = self._head(self._forward.embed(tokens[:, None]), hidden[:, None], view.caches)
            rows = view.output_rows
            hidden = outputs[:, 0] if rows is None else outputs[mx.array(rows, dtype=mx.int32), 0]
            builder.sample_next(self._logits(hidden), self._sampler, of_part=True)
            previous_rows = next_rows
        for slot, length in row_lengths.items():
            self._store.roll_back(slot, length)
        forwards.markers.append(self._store.marker())
        return builder.build(self._synchronize)

    def on_decode(
        self, sequences: Sequence[RunningSequence], starts: Sequence[int], hidden: mx.array | None
    ) -> None:
        """Keep the hidden states of a decode, drafts included, until the next step appends them.

        Args:
            sequences: those that the decode computes.
            starts: index of each one's first token among the B * L tokens of `hidden`.
            hidden: [B, L, H] in the model's dtype.
        """
        assert hidden is not None
        for sequence, start in zip(sequences, starts, strict=True):
            pending = self._pending.setdefault(sequence.sequence_id, [])
            if pending:
                # The token that this decode reads.
                pending[-1].next_token = sequence.last_token
            pending.append(PendingHidden(hidden, start))
            while sum(states.count for states in pending[1:]) >= PENDING_STATES_MAX:
                del pending[0]

    def _catch_up(self, sequences: Sequence[RunningSequence]) -> mx.array:
        """Build the forward that appends the kept hidden states.

        Returns:
            The head's output at the last entry of each sequence, [sequences, H].
        """
        pending = [self._take_pending(sequence) for sequence in sequences]
        counts = [sum(states.count for states in kept) for kept in pending]
        width = max(counts)
        slots = [sequence.slot for sequence in sequences]
        view = self._store.decode_padded(slots, counts)
        hidden, tokens = ElementGather(), ElementGather()
        row_numbers = {slot: row for row, slot in enumerate(slots)}
        for input_row, slot in enumerate(view.input_slots):
            row = row_numbers.get(slot)
            if row is not None:
                for states in pending[row]:
                    ids, index = states.next_token or sequences[row].decoded_token()
                    hidden.add(states.hidden, states.start, states.count)
                    tokens.add(ids, index - states.count + 1, states.count)
            hidden.pad((input_row + 1) * width)
            tokens.pad((input_row + 1) * width)
        embedded = self._forward.embed(tokens.take().reshape(-1, width))
        kept_hidden = hidden.take().reshape(-1, width, self._head.width)
        outputs = self._head(embedded, kept_hidden, view.caches)
        input_rows = {slot: row for row, slot in enumerate(view.input_slots)}
        last_entries = [
            input_rows[slot] * width + count - 1 for slot, count in zip(slots, counts, strict=True)
        ]
        return outputs.reshape(-1, outputs.shape[-1])[mx.array(last_entries, dtype=mx.int32)]

    def _take_pending(self, sequence: RunningSequence) -> list[PendingHidden]:
        pending = self._pending.pop(sequence.sequence_id, None)
        if not pending:
            raise InvariantBroken(
                f"sequence {sequence.sequence_id} cannot get drafts: it has no kept hidden states"
            )
        return pending

    def _logits(self, state: mx.array) -> mx.array:
        """Return logits [B, P] of this rank's part of the vocabulary, of hidden states [B, H]."""
        return self._forward.head(state[:, None])[:, 0]
