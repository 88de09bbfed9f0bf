"""Decoding the rows of a step: one token each, or one and the drafts behind it."""

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.forward import Forward
from services.rank_worker.kv import BatchView, KVStore
from services.rank_worker.running import Batch, Running
from services.rank_worker.speculation import group_rows
from services.rank_worker.step import Forwards
from shared.errors import InvariantBroken
from shared.messages import StepPlan


class Decode:
    """The decodes of a step. Nothing is started: the draw starts them."""

    def __init__(
        self,
        store: KVStore,
        forward: Forward,
        batch: Batch,
        *,
        vocab_size: int,
        forward_tokens: int,
    ) -> None:
        """Start.

        Args:
            store: KV of all rows.
            forward: the model.
            batch: whose rows they are.
            vocab_size: bound of draft ids.
            forward_tokens: see `speculation.group_rows`; the same on all ranks.
        """
        self._store = store
        self._forward = forward
        self._batch = batch
        self._vocab_size = vocab_size
        self._forward_tokens = forward_tokens

    def run(self, plan: StepPlan, forwards: Forwards) -> None:
        """Build the forwards of a plan's decodes; each row is longer by its drafts and one.

        Raises:
            InvariantBroken: the decodes or drafts contradict the state.
        """
        if plan.drafts and len(plan.drafts) != len(plan.decodes):
            raise InvariantBroken(
                f"plan {plan.step_id} has {len(plan.drafts)} lists of drafts for "
                f"{len(plan.decodes)} decodes"
            )
        if not plan.decodes:
            return
        sequences = [self._batch.settled(sequence_id) for sequence_id in plan.decodes]
        slots = [sequence.slot for sequence in sequences]
        if any(after <= before for before, after in itertools.pairwise(slots)):
            raise InvariantBroken(f"decodes {plan.decodes} are not in slot order: slots {slots}")
        if not any(plan.drafts):
            self._run_plain(sequences, slots, forwards)
            return
        self._check_drafts(plan, slots)
        counts = [len(drafts) + 1 for drafts in plan.drafts]
        before: mx.array | None = None
        for group in group_rows(slots, counts, self._forward_tokens):
            chosen = [sequences[index] for index in group]
            before = self._run_drafts(
                chosen, [plan.drafts[index] for index in group], forwards, before
            )

    def _run_plain(
        self, sequences: Sequence[Running], slots: Sequence[int], forwards: Forwards
    ) -> None:
        view = self._store.decode(slots, 1)
        tokens = _last_tokens(sequences, view.input_slots)
        logits = self._forward.all_logits(tokens[:, None], view.caches)[:, -1]
        if view.output_rows is not None:
            logits = logits[mx.array(view.output_rows, dtype=mx.int32)]
        forwards.append(logits, [sequence.sequence_id for sequence in sequences])

    def _run_drafts(
        self,
        sequences: Sequence[Running],
        drafts: Sequence[Sequence[int]],
        forwards: Forwards,
        before: mx.array | None,
    ) -> mx.array:
        """Build one forward over rows that are padded to the longest; return its logits."""
        slots = [sequence.slot for sequence in sequences]
        width = 1 + max(map(len, drafts))
        lengths = [
            self._store.length(slot) + 1 + len(k) for slot, k in zip(slots, drafts, strict=True)
        ]
        view = self._store.decode(slots, width)
        for slot, length in zip(slots, lengths, strict=True):
            # What padding leaves behind a row is never looked at, and written over by what comes.
            self._store.roll_back(slot, length)
        tokens = _last_tokens(sequences, view.input_slots)[:, None]
        if width > 1:
            tokens = mx.concatenate([tokens, _padded(slots, drafts, view.input_slots)], axis=1)
        if before is not None:
            # In one graph MLX might write for this forward what the one before has yet to read,
            # which copies the rows; and its collectives might come first on one rank only.
            (tokens,) = mx.depends([tokens], [before])
        logits = self._forward.some_logits(tokens, view.caches, _wanted(view, drafts, width))
        forwards.append(
            logits,
            [
                sequence.sequence_id
                for sequence, k in zip(sequences, drafts, strict=True)
                for _ in range(1 + len(k))
            ],
        )
        return logits

    def _check_drafts(self, plan: StepPlan, slots: Sequence[int]) -> None:
        """Refuse drafts that the rows have no room for, or that cannot be taken back."""
        if not self._store.can_roll_back:
            raise InvariantBroken(
                f"plan {plan.step_id} has drafts, but this model's rows cannot be rolled back"
            )
        highest = max(max(drafts, default=0) for drafts in plan.drafts)
        if highest >= self._vocab_size:
            raise InvariantBroken(
                f"plan {plan.step_id} has draft {highest}, the vocabulary {self._vocab_size} tokens"
            )
        longest = max(map(len, plan.drafts))
        room = self._store.row_tokens
        if any(self._store.length(slot) + 1 + longest > room for slot in slots):
            raise InvariantBroken(
                f"plan {plan.step_id} has {longest} drafts: not every row of "
                f"{[self._store.length(slot) for slot in slots]} tokens has room in {room}"
            )


def _wanted(view: BatchView, drafts: Sequence[Sequence[int]], width: int) -> list[int] | None:
    """Return which positions of the forward, row by row, are no padding; None: all of them."""
    rows = view.output_rows or range(len(drafts))
    wanted = [
        row * width + place
        for row, k in zip(rows, drafts, strict=True)
        for place in range(1 + len(k))
    ]
    return None if len(wanted) == len(view.input_slots) * width else wanted


def _padded(
    slots: Sequence[int], drafts: Sequence[Sequence[int]], input_slots: Sequence[int]
) -> mx.array:
    """Return drafts, int32 [input slots, longest]; 0 where there is none."""
    by_slot = dict(zip(slots, drafts, strict=True))
    padded = np.zeros((len(input_slots), max(map(len, drafts))), dtype=np.int32)
    for row, slot in zip(padded, input_slots, strict=True):
        known = by_slot.get(slot, ())
        row[: len(known)] = known
    return mx.array(padded)


def _last_tokens(sequences: Sequence[Running], slots: Sequence[int]) -> mx.array:
    """Return the last sampled token of each slot, int32 [slots]; any token in holes."""
    by_slot = {sequence.slot: sequence for sequence in sequences}
    sources: list[mx.array] = []
    offsets: dict[int, int] = {}
    indices: list[int] = []
    total = 0
    for slot in slots:
        if slot not in by_slot:
            indices.append(0)
            continue
        last = by_slot[slot].last
        if last is None:
            raise InvariantBroken(f"slot {slot} decodes before its prefill has ended")
        ids, index = last
        if id(ids) not in offsets:
            offsets[id(ids)] = total
            sources.append(ids)
            total += ids.shape[0]
        indices.append(offsets[id(ids)] + index)
    tokens = sources[0] if len(sources) == 1 else mx.concatenate(sources)
    if indices == list(range(total)):
        # The same rows as in the step before: its tokens are the input as they are.
        return tokens
    return tokens[mx.array(indices, dtype=mx.int32)]
