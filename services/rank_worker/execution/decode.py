"""Decoding the rows of a step: one token each, or one and the drafts behind it."""

import itertools
from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.batch.decode_groups import group_rows
from services.rank_worker.batch.running_batch import RunningSequence, SequenceBatch, last_tokens
from services.rank_worker.batch.step_parts import Forwards
from services.rank_worker.kv_cache.rows import KVStore
from services.rank_worker.model.forward import Forward
from services.rank_worker.sampling.drafts import Drafts
from services.rank_worker.speculation.proposer import RankProposer
from shared.errors import InvariantBroken
from shared.messages import StepPlan


class DecodeExecutor:
    """The decodes of a step. Nothing is started: the draw starts them."""

    def __init__(
        self,
        store: KVStore,
        forward: Forward,
        batch: SequenceBatch,
        proposer: RankProposer,
        *,
        vocab_size: int,
        forward_tokens: int,
    ) -> None:
        """Start.

        Args:
            store: KV of all rows.
            forward: the model.
            batch: whose rows they are.
            proposer: of drafts that no plan holds.
            vocab_size: bound of draft ids.
            forward_tokens: see `speculation.group_rows`; the same on all ranks.
        """
        self._store = store
        self._forward = forward
        self._batch = batch
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._forward_tokens = forward_tokens

    def run(self, plan: StepPlan, forwards: Forwards) -> Drafts:
        """Build the forwards of a plan's decodes; each row is longer by its drafts and one.

        Returns:
            The drafts that they verify.

        Raises:
            InvariantBroken: the decodes or drafts contradict the state.
        """
        given = {"lists of drafts": len(plan.drafts), "draft counts": len(plan.draft_counts)}
        for name, number in given.items():
            if number and number != len(plan.decodes):
                raise InvariantBroken(
                    f"plan {plan.step_id} has {number} {name} for {len(plan.decodes)} decodes"
                )
        if plan.drafts and plan.draft_counts:
            raise InvariantBroken(
                f"plan {plan.step_id} has drafts and has the ranks propose others"
            )
        if not plan.decodes:
            return Drafts({}, [])
        sequences = [self._batch.settled(sequence_id) for sequence_id in plan.decodes]
        slots = [sequence.slot for sequence in sequences]
        if any(after <= before for before, after in itertools.pairwise(slots)):
            raise InvariantBroken(f"decodes {plan.decodes} are not in slot order: slots {slots}")
        drafts = self._drafts(plan, sequences, forwards)
        if not drafts.counts:
            self._run_plain(sequences, slots, forwards)
            return drafts
        counts = [drafts.count(sequence_id) + 1 for sequence_id in plan.decodes]
        before: mx.array | None = None
        for group in group_rows(slots, counts, self._forward_tokens):
            before = self._run_drafts([sequences[row] for row in group], drafts, forwards, before)
        return drafts

    def _drafts(
        self, plan: StepPlan, sequences: Sequence[RunningSequence], forwards: Forwards
    ) -> Drafts:
        """Return the plan's drafts, or what the ranks propose in their place."""
        lengths = [self._store.length(sequence.slot) for sequence in sequences]
        if any(plan.drafts):
            self._check_room(plan, max(map(len, plan.drafts)), lengths)
            highest = max(max(drafts, default=0) for drafts in plan.drafts)
            if highest >= self._vocab_size:
                raise InvariantBroken(
                    f"plan {plan.step_id} has draft {highest}, the vocabulary {self._vocab_size} "
                    "tokens"
                )
        if not plan.draft_counts:
            return Drafts.of_plan(plan)
        if max(plan.draft_counts) > 0:
            self._check_room(plan, max(plan.draft_counts), lengths)
        return self._proposer.propose(sequences, lengths, plan.draft_counts, forwards)

    def _run_plain(
        self, sequences: Sequence[RunningSequence], slots: Sequence[int], forwards: Forwards
    ) -> None:
        view = self._store.decode(slots, 1)
        tokens = last_tokens(sequences, view.input_slots)
        logits = self._forward.all_logits(tokens[:, None], view.caches)[:, -1]
        self._proposer.decoded(
            sequences, view.output_rows or range(len(slots)), self._forward.hidden
        )
        if view.output_rows is not None:
            logits = logits[mx.array(view.output_rows, dtype=mx.int32)]
        forwards.append(logits, [sequence.sequence_id for sequence in sequences])

    def _run_drafts(
        self,
        sequences: Sequence[RunningSequence],
        drafts: Drafts,
        forwards: Forwards,
        before: mx.array | None,
    ) -> mx.array:
        """Build one forward over rows that are padded to the longest; return its logits."""
        slots = [sequence.slot for sequence in sequences]
        counts = [drafts.count(sequence.sequence_id) + 1 for sequence in sequences]
        width = max(counts)
        lengths = [
            self._store.length(slot) + count for slot, count in zip(slots, counts, strict=True)
        ]
        view = self._store.decode(slots, width)
        for slot, length in zip(slots, lengths, strict=True):
            # What padding leaves behind a row is never looked at, and written over by what comes.
            self._store.roll_back(slot, length)
        tokens = last_tokens(sequences, view.input_slots)[:, None]
        if width > 1:
            owners = {sequence.slot: sequence.sequence_id for sequence in sequences}
            padded = drafts.padded([owners.get(slot) for slot in view.input_slots])
            tokens = mx.concatenate([tokens, padded], axis=1)
        if before is not None:
            # In one graph MLX might write for this forward what the one before has yet to read,
            # which copies the rows; and its collectives might come first on one rank only.
            (tokens,) = mx.depends([tokens], [before])
        rows = view.output_rows or range(len(slots))
        wanted = _wanted(rows, counts, width)
        every = len(wanted) == len(view.input_slots) * width
        logits = self._forward.some_logits(tokens, view.caches, None if every else wanted)
        self._proposer.decoded(sequences, rows, self._forward.hidden)
        forwards.append(
            logits,
            [
                sequence.sequence_id
                for sequence, count in zip(sequences, counts, strict=True)
                for _ in range(count)
            ],
        )
        return logits

    def _check_room(self, plan: StepPlan, longest: int, lengths: Sequence[int]) -> None:
        """Refuse drafts that the rows have no room for, or that cannot be taken back."""
        if not self._store.can_roll_back:
            raise InvariantBroken(
                f"plan {plan.step_id} has drafts, but this model's rows cannot be rolled back"
            )
        room = self._store.row_tokens
        if any(length + 1 + longest > room for length in lengths):
            raise InvariantBroken(
                f"plan {plan.step_id} has {longest} drafts: not every row of {list(lengths)} "
                f"tokens has room in {room}"
            )


def _wanted(rows: Sequence[int], counts: Sequence[int], width: int) -> list[int]:
    """Return which positions of the forward, row by row, are no padding."""
    return [
        row * width + place
        for row, count in zip(rows, counts, strict=True)
        for place in range(count)
    ]
