"""Decoding of a step: one token per row, or one token and the drafts after it.

Owns no rows; `KVStore` does. B is the number of rows in a forward, L the tokens per row, V the
number of token ids in the vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.batch.decode_groups import group_decode_rows
from services.rank_worker.batch.running_batch import RunningSequence, SequenceBatch, last_tokens
from services.rank_worker.batch.step_outputs import ForwardOutputs
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.speculation.proposer import RankProposer
from shared.errors import InvariantBroken
from shared.messages import StepPlan

_ANY_TOKENS = 16
"""Up to this number of tokens no forward is padded."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeExecutor:
    """Builds the decodes of a step: forwards of one token, or a token and its drafts, per row.

    Their computation starts later, with the sampling.
    """

    store: KVStore
    """KV of all rows."""
    forward: Forward
    """The model."""
    batch: SequenceBatch
    """The running sequences."""
    proposer: RankProposer
    """Proposes drafts that no plan holds."""
    vocab_size: int
    """V; draft ids must be below it."""
    forward_cost_tokens: int
    """See `group_decode_rows`; the same on all ranks."""

    def waits_for_earlier_steps(self, plan: StepPlan) -> bool:
        """Tell whether `run` waits for the device, and so for all earlier steps."""
        if not plan.decodes or self.store.writes_in_place:
            return False
        slots = [self.batch.find(sequence_id).slot for sequence_id in plan.decodes]
        drafts = max([0, *map(len, plan.drafts), *plan.draft_counts])
        tokens = max(map(self.store.length, slots)) + 1 + drafts
        return self.store.copies_wait_for_device(max(slots) + 1, tokens, 1 + drafts)

    def run(self, plan: StepPlan, forwards: ForwardOutputs) -> StepDrafts:
        """Build the forwards of a plan's decodes. Each row grows by one token and its drafts.

        Args:
            plan: the step; holds drafts, or says how many each rank proposes, or neither.
            forwards: gets the logits of the decodes and, where a drafter proposes, its markers:
                small arrays whose evaluation runs the drafter's forwards.

        Returns:
            The drafts that the forwards verify.

        Raises:
            InvariantBroken: the decodes or drafts contradict the state.
        """
        given = {"lists of drafts": len(plan.drafts), "draft counts": len(plan.draft_counts)}
        for name, count in given.items():
            if count and count != len(plan.decodes):
                raise InvariantBroken(
                    f"plan {plan.step_id} has {count} {name} for {len(plan.decodes)} decodes"
                )
        if plan.drafts and plan.draft_counts:
            raise InvariantBroken(
                f"plan {plan.step_id} holds drafts and also has the ranks propose drafts"
            )
        if not plan.decodes:
            return StepDrafts({}, [])
        sequences = [self.batch.find_verified(sequence_id) for sequence_id in plan.decodes]
        slots = [sequence.slot for sequence in sequences]
        if any(following <= slot for slot, following in itertools.pairwise(slots)):
            raise InvariantBroken(f"decodes {plan.decodes} are not in slot order: slots {slots}")
        drafts = self._find_drafts(plan, sequences, forwards)
        if not drafts.counts:
            self._run_plain(sequences, slots, forwards)
            return drafts
        token_counts = [drafts.count(sequence_id) + 1 for sequence_id in plan.decodes]
        if self.store.writes_in_place:
            self._run_by_token(sequences, token_counts, drafts, forwards)
            return drafts
        previous_logits: mx.array | None = None
        for group in group_decode_rows(slots, token_counts, self.forward_cost_tokens):
            previous_logits = self._run_verification(
                [sequences[row] for row in group], drafts, forwards, previous_logits
            )
        return drafts

    def _find_drafts(
        self, plan: StepPlan, sequences: Sequence[RunningSequence], forwards: ForwardOutputs
    ) -> StepDrafts:
        """Return the drafts of the plan, or those that the ranks propose."""
        lengths = [self.store.length(sequence.slot) for sequence in sequences]
        if any(plan.drafts):
            self._check_room(plan, max(map(len, plan.drafts)), lengths)
            highest = max(max(drafts, default=0) for drafts in plan.drafts)
            if highest >= self.vocab_size:
                raise InvariantBroken(
                    f"plan {plan.step_id} has the draft {highest}, but the vocabulary has "
                    f"{self.vocab_size} tokens"
                )
        if not plan.draft_counts:
            return StepDrafts.from_plan(plan)
        if max(plan.draft_counts) > 0:
            self._check_room(plan, max(plan.draft_counts), lengths)
        return self.proposer.propose(sequences, lengths, plan.draft_counts, forwards)

    def _run_plain(
        self, sequences: Sequence[RunningSequence], slots: Sequence[int], forwards: ForwardOutputs
    ) -> None:
        """Build one forward over rows without drafts; its logits are [B, V]."""
        view = self.store.decode(slots, 1)
        tokens = last_tokens(sequences, view.input_slots)
        logits = self.forward.all_logits(tokens[:, None], view.caches, view.output_rows)[:, -1]
        self.proposer.on_decode(
            sequences, view.output_rows or range(len(slots)), self.forward.hidden
        )
        if view.output_rows is not None:
            logits = logits[mx.array(view.output_rows, dtype=mx.int32)]
        forwards.add_decode(logits, [sequence.sequence_id for sequence in sequences])

    def _run_by_token(
        self,
        sequences: Sequence[RunningSequence],
        token_counts: Sequence[int],
        drafts: StepDrafts,
        forwards: ForwardOutputs,
    ) -> None:
        """Build one forward over rows with drafts, in which each token is a row by itself.

        So no row is padded, and kernels attend for each token.
        """
        slots, total = [sequence.slot for sequence in sequences], sum(token_counts)
        starts = list(itertools.accumulate(token_counts, initial=0))[:-1]
        # Padding attends to the shortest row.
        shortest = min(range(len(slots)), key=lambda row: self.store.length(slots[row]))
        repeated = [starts[shortest]] * (_padded_count(total) - total)
        caches = self.store.decode_tokens(slots, token_counts, repeated)
        indices: list[int] = []
        for row, sequence in enumerate(sequences):
            count = drafts.count(sequence.sequence_id)
            own = drafts.index_range(sequence.sequence_id, count)
            indices += [row, *(len(sequences) + one for one in own)]
        indices += [indices[index] for index in repeated]
        known = mx.concatenate([last_tokens(sequences, slots), drafts.ids])
        tokens = known[mx.array(indices, dtype=mx.int32)]
        logits = self.forward.all_logits(tokens[:, None], caches, range(total))[:total, 0]
        self.proposer.on_decode(sequences, starts, self.forward.hidden)
        forwards.add_decode(logits, _sequence_ids(sequences, token_counts))

    def _run_verification(
        self,
        sequences: Sequence[RunningSequence],
        drafts: StepDrafts,
        forwards: ForwardOutputs,
        previous_logits: mx.array | None,
    ) -> mx.array:
        """Build one forward over rows with drafts, padded to the longest.

        Args:
            sequences: of the rows, in slot order.
            drafts: of these and other sequences.
            forwards: gets the logits.
            previous_logits: logits of the previous forward, which must be computed first.

        Returns:
            Logits of all tokens that are not padding, [tokens, V].
        """
        slots = [sequence.slot for sequence in sequences]
        token_counts = [drafts.count(sequence.sequence_id) + 1 for sequence in sequences]
        width = max(token_counts)
        view = self.store.decode_padded(slots, token_counts)
        tokens = last_tokens(sequences, view.input_slots)[:, None]
        if width > 1:
            sequence_ids = {sequence.slot: sequence.sequence_id for sequence in sequences}
            padded = drafts.padded_ids([sequence_ids.get(slot) for slot in view.input_slots])
            tokens = mx.concatenate([tokens, padded], axis=1)
        if previous_logits is not None:
            # Without this MLX might write rows for this forward before the previous one has read
            # them, which copies the rows, or run the collectives in another order on one rank.
            (tokens,) = mx.depends([tokens], [previous_logits])
        rows = view.output_rows or range(len(slots))
        positions = _unpadded_positions(rows, token_counts, width)
        selects_all = len(positions) == len(view.input_slots) * width
        logits = self.forward.selected_logits(
            tokens, view.caches, None if selects_all else positions
        )
        self.proposer.on_decode(sequences, [row * width for row in rows], self.forward.hidden)
        forwards.add_decode(logits, _sequence_ids(sequences, token_counts))
        return logits

    def _check_room(self, plan: StepPlan, draft_count_max: int, lengths: Sequence[int]) -> None:
        """Check that the rows have room for drafts and can be rolled back.

        Raises:
            InvariantBroken: they have not, or cannot.
        """
        if not self.store.can_roll_back:
            raise InvariantBroken(
                f"plan {plan.step_id} has drafts, but this model's rows cannot be rolled back"
            )
        room = self.store.row_tokens
        if any(length + 1 + draft_count_max > room for length in lengths):
            raise InvariantBroken(
                f"plan {plan.step_id} has up to {draft_count_max} drafts per row, but rows of "
                f"{list(lengths)} tokens do not all have room for them in {room} tokens"
            )


def _padded_count(tokens: int) -> int:
    """Round a number of tokens up, so that a compiled decode has few shapes."""
    if tokens <= _ANY_TOKENS:
        return tokens
    step = max(8, (1 << (tokens - 1).bit_length()) // 16)
    return -(-tokens // step) * step


def _sequence_ids(sequences: Sequence[RunningSequence], token_counts: Sequence[int]) -> list[int]:
    """Return the sequence of each token, row by row."""
    return [
        sequence.sequence_id
        for sequence, count in zip(sequences, token_counts, strict=True)
        for _ in range(count)
    ]


def _unpadded_positions(rows: Sequence[int], token_counts: Sequence[int], width: int) -> list[int]:
    """Return the flat indices, in [B, L], of the tokens that are not padding, row by row."""
    return [
        row * width + column
        for row, count in zip(rows, token_counts, strict=True)
        for column in range(count)
    ]
