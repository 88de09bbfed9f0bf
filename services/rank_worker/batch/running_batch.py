"""The sequences of the running batch on one rank. Owns their slots and last tokens; holds no KV."""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.draft_acceptance import DraftVerification
from shared.errors import InvariantBroken

TokenReference = tuple[mx.array, int]
"""A token on the device: an array of token ids, int32 [n], and the token's index in it."""


@dataclasses.dataclass(slots=True)
class RunningSequence:
    """A sequence that occupies a slot of the running batch, with its last token on the device."""

    sequence_id: int
    slot: int
    tokens: np.ndarray
    """int32 [tokens]: the token ids that were known when it was admitted."""
    last_token: TokenReference | None = None
    """Its last token; None before its prefill has ended."""
    verification: DraftVerification | None = None
    """The drafts that a step verifies for it, until a plan says how many of them are accepted;
    None: there are no such drafts."""


def last_tokens(sequences: Sequence[RunningSequence], slots: Sequence[int]) -> mx.array:
    """Return the last token of each slot, int32 [slots]; any token where a slot has no sequence.

    Args:
        sequences: the sequences that decode.
        slots: slot of each row of the forward's input.

    Raises:
        InvariantBroken: a sequence decodes before its prefill has ended.
    """
    by_slot = {sequence.slot: sequence for sequence in sequences}
    arrays: list[mx.array] = []
    offsets: dict[int, int] = {}
    indices: list[int] = []
    total = 0
    for slot in slots:
        if slot not in by_slot:
            indices.append(0)
            continue
        last_token = by_slot[slot].last_token
        if last_token is None:
            raise InvariantBroken(f"slot {slot} decodes before its prefill has ended")
        ids, index = last_token
        if id(ids) not in offsets:
            offsets[id(ids)] = total
            arrays.append(ids)
            total += ids.shape[0]
        indices.append(offsets[id(ids)] + index)
    tokens = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
    if indices == list(range(total)):
        # The rows are those of the previous step, so its tokens are the input.
        return tokens
    return tokens[mx.array(indices, dtype=mx.int32)]


class SequenceBatch:
    """All running sequences of one rank, by id and by slot.

    Its methods raise InvariantBroken where a plan contradicts the batch.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, RunningSequence] = {}
        self._sequence_ids: dict[int, int] = {}
        """Sequence id of each occupied slot."""

    def sequence_ids(self) -> list[int]:
        """Return all sequence ids, ascending."""
        return sorted(self._sequences)

    def occupied_slots(self) -> list[tuple[int, int]]:
        """Return (slot, sequence id) of every occupied slot, in slot order."""
        return sorted(self._sequence_ids.items())

    def find(self, sequence_id: int) -> RunningSequence:
        """Return the running sequence with this id.

        Raises:
            InvariantBroken: it is not in the batch.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise InvariantBroken(
                f"the plan names sequence {sequence_id}, which is not in the batch"
            )
        return sequence

    def find_verified(self, sequence_id: int) -> RunningSequence:
        """Return a sequence, provided that no drafts of it wait for a plan to accept them.

        Raises:
            InvariantBroken: it is not in the batch, or it has such drafts.
        """
        sequence = self.find(sequence_id)
        if sequence.verification is not None:
            raise InvariantBroken(
                f"the plan uses sequence {sequence_id} before a plan says how many of its "
                f"{sequence.verification.draft_count} drafts are accepted"
            )
        return sequence

    def slot_of(self, sequence_id: int) -> int:
        """Return the slot of a sequence; raises InvariantBroken if it is not in the batch."""
        return self.find(sequence_id).slot

    def slot_of_verified(self, sequence_id: int) -> int:
        """Return the slot of a sequence.

        Raises:
            InvariantBroken: it is not in the batch, or drafts of it wait for a plan to accept them.
        """
        return self.find_verified(sequence_id).slot

    def add(self, sequence: RunningSequence, row_count: int) -> None:
        """Add a sequence to the batch in the slot that it names.

        Args:
            sequence: the sequence; its slot must be free.
            row_count: number of rows in the batch; valid slots are 0 to row_count - 1.

        Raises:
            InvariantBroken: it is in the batch already, or its slot is occupied or not below
                `row_count`.
        """
        sequence_id, slot = sequence.sequence_id, sequence.slot
        if sequence_id in self._sequences or slot in self._sequence_ids or slot >= row_count:
            raise InvariantBroken(
                f"sequence {sequence_id} cannot enter slot {slot}: "
                f"{row_count} rows, occupied: {self.occupied_slots()}"
            )
        self._sequence_ids[slot] = sequence_id
        self._sequences[sequence_id] = sequence

    def remove(self, sequence_id: int) -> RunningSequence:
        """Remove a sequence and return it; raises InvariantBroken if it is not in the batch."""
        sequence = self.find(sequence_id)
        del self._sequence_ids[sequence.slot]
        del self._sequences[sequence_id]
        return sequence

    def move(self, sequence_id: int, slot: int) -> int:
        """Move a sequence to a free slot with a lower number.

        Args:
            sequence_id: the sequence.
            slot: its new slot.

        Returns:
            Its old slot.

        Raises:
            InvariantBroken: it is not in the batch, or the slot is occupied or not lower.
        """
        sequence = self.find(sequence_id)
        old = sequence.slot
        if slot >= old or slot in self._sequence_ids:
            raise InvariantBroken(
                f"sequence {sequence_id} cannot move from slot {old} to "
                f"{slot}, occupied by {self._sequence_ids.get(slot)}"
            )
        del self._sequence_ids[old]
        self._sequence_ids[slot] = sequence_id
        sequence.slot = slot
        return old

    def check_row_count(self, row_count: int) -> None:
        """Require every occupied slot to be below `row_count`, the number of rows in the batch.

        Raises:
            InvariantBroken: an occupied slot is not below it.
        """
        if any(slot >= row_count for slot in self._sequence_ids):
            raise InvariantBroken(
                f"slots {sorted(self._sequence_ids)} are occupied: {row_count} rows are too few"
            )
