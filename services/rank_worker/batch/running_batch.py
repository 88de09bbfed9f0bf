"""The sequences of the running batch on one rank: whose row is where, and what it decodes next."""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.draft_acceptance import Verifying
from shared.errors import InvariantBroken


@dataclasses.dataclass(slots=True)
class RunningSequence:
    """One sequence of the batch."""

    sequence_id: int
    slot: int
    tokens: np.ndarray
    """int32, all ids known when it was admitted."""
    last: tuple[mx.array, int] | None = None
    """Where its last token lies on the device: (ids of some step, index). None: not prefilled."""
    verifying: Verifying | None = None
    """Drafts of which no plan has said yet what is accepted."""


def last_tokens(sequences: Sequence[RunningSequence], slots: Sequence[int]) -> mx.array:
    """Return the last sampled token of each slot, int32 [slots]; any token in holes.

    Raises:
        InvariantBroken: one of them has none yet.
    """
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


class SequenceBatch:
    """All sequences of one rank by id and by slot. What contradicts it ends the world."""

    def __init__(self) -> None:
        self._sequences: dict[int, RunningSequence] = {}
        self._owners: dict[int, int] = {}
        """Sequence id by slot."""

    def ids(self) -> list[int]:
        """Return all sequence ids, rising."""
        return sorted(self._sequences)

    def slots(self) -> list[tuple[int, int]]:
        """Return (slot, sequence id) of every row that is held, in slot order."""
        return sorted(self._owners.items())

    def find(self, sequence_id: int) -> RunningSequence:
        """Return a sequence.

        Raises:
            InvariantBroken: it is not here.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvariantBroken(f"the plan names sequence {sequence_id}, which is not here")
        return sequence

    def settled(self, sequence_id: int) -> RunningSequence:
        """Return a sequence whose row holds nothing but its tokens.

        Raises:
            InvariantBroken: it is not here, or it waits for a plan that cuts its row.
        """
        sequence = self.find(sequence_id)
        if sequence.verifying is not None:
            raise InvariantBroken(
                f"sequence {sequence_id} goes on before a plan says which of its "
                f"{sequence.verifying.count} drafts are accepted"
            )
        return sequence

    def slot_of(self, sequence_id: int) -> int:
        """Return a sequence's slot; raises as `find`."""
        return self.find(sequence_id).slot

    def settled_slot_of(self, sequence_id: int) -> int:
        """Return a sequence's slot; raises as `settled`."""
        return self.settled(sequence_id).slot

    def add(self, sequence: RunningSequence, row_count: int) -> None:
        """Take a sequence in; its slot must be free and less than `row_count`."""
        sequence_id, slot = sequence.sequence_id, sequence.slot
        if sequence_id in self._sequences or slot in self._owners or slot >= row_count:
            raise InvariantBroken(
                f"sequence {sequence_id} cannot enter slot {slot}: "
                f"{row_count} rows, held {self.slots()}"
            )
        self._owners[slot] = sequence_id
        self._sequences[sequence_id] = sequence

    def remove(self, sequence_id: int) -> RunningSequence:
        """Let a sequence go and return it."""
        sequence = self.find(sequence_id)
        del self._owners[sequence.slot]
        del self._sequences[sequence_id]
        return sequence

    def move(self, sequence_id: int, slot: int) -> int:
        """Give a sequence a free slot with a lower number; return the slot that it had."""
        sequence = self.find(sequence_id)
        old = sequence.slot
        if slot >= old or slot in self._owners:
            raise InvariantBroken(
                f"sequence {sequence_id} cannot move from slot {old} to "
                f"{slot}, held by {self._owners.get(slot)}"
            )
        del self._owners[old]
        self._owners[slot] = sequence_id
        sequence.slot = slot
        return old

    def check_rows(self, row_count: int) -> None:
        """Refuse to lose rows that are held."""
        if any(slot >= row_count for slot in self._owners):
            raise InvariantBroken(
                f"slots {sorted(self._owners)} are held, the plan keeps {row_count} rows"
            )
