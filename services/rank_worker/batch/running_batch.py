"""The sequences of the running batch on one rank. Owns their slots and last tokens; holds no KV."""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from services.rank_worker.sampling.draft_acceptance import DraftVerification
from services.rank_worker.sampling.grammar.matcher import Matcher
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
    matcher: Matcher | None = None
    """Of its grammar; None: it has none."""

    def decoded_token(self) -> TokenReference:
        """Return the token that its next decode reads: its last one.

        Raises:
            InvariantBroken: its prefill has not ended.
        """
        if self.last_token is None:
            raise InvariantBroken(f"slot {self.slot} decodes before its prefill has ended")
        return self.last_token


class ElementGather:
    """A list of elements from several arrays, which one operation on the device collects."""

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}
        """Start of each array in the concatenation of all, by `id`."""
        self._sources: list[mx.array] = []
        self._total = 0
        self._indices: list[int] = []

    def add(self, array: mx.array, first: int, count: int) -> None:
        """Append `count` elements of an array to the list.

        Args:
            array: [n], or [B, L, H], which counts as n = B * L elements; it must live until `take`.
            first: index of the first element.
            count: number of elements.
        """
        if id(array) not in self._offsets:
            flat = array.reshape(-1, array.shape[-1]) if array.ndim == 3 else array
            self._offsets[id(array)] = self._total
            self._sources.append(flat)
            self._total += flat.shape[0]
        start = self._offsets[id(array)] + first
        self._indices += range(start, start + count)

    def pad(self, length: int) -> None:
        """Append any elements until the list has this length."""
        self._indices += [0] * (length - len(self._indices))

    def take(self) -> mx.array:
        """Return the elements in order, [elements] or [elements, H], in the dtype of the arrays."""
        sources = self._sources
        joined = sources[0] if len(sources) == 1 else mx.concatenate(sources)
        if self._indices == list(range(self._total)):
            # For tokens: the rows are those of the previous step, so its tokens are the input.
            return joined
        return joined[mx.array(self._indices, dtype=mx.int32)]


def last_tokens(sequences: Sequence[RunningSequence], slots: Sequence[int]) -> mx.array:
    """Return the last token of each slot, int32 [slots]; any token where a slot has no sequence.

    Args:
        sequences: the sequences that decode.
        slots: slot of each row of the forward's input.

    Raises:
        InvariantBroken: a sequence decodes before its prefill has ended.
    """
    by_slot = {sequence.slot: sequence for sequence in sequences}
    tokens = ElementGather()
    for row, slot in enumerate(slots):
        if slot in by_slot:
            tokens.add(*by_slot[slot].decoded_token(), 1)
        tokens.pad(row + 1)
    return tokens.take()


def pad_tokens(rows: Sequence[np.ndarray | Sequence[int]], width: int) -> mx.array:
    """Return rows of token ids as one array, int32 [rows, width], padded with 0 on the right."""
    padded = np.zeros((len(rows), width), dtype=np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return mx.array(padded)


class SequenceBatch:
    """All running sequences of one rank, by sequence id.

    Its methods raise InvariantBroken where a plan contradicts the batch.
    """

    def __init__(self) -> None:
        self._sequences: dict[int, RunningSequence] = {}
        """By sequence id."""

    def occupied_slots(self) -> list[tuple[int, int]]:
        """Return (slot, sequence id) of every occupied slot, in slot order."""
        return sorted((one.slot, one.sequence_id) for one in self._sequences.values())

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
        is_taken = sequence_id in self._sequences or slot in dict(self.occupied_slots())
        if is_taken or slot >= row_count:
            raise InvariantBroken(
                f"sequence {sequence_id} cannot enter slot {slot}: "
                f"{row_count} rows, occupied: {self.occupied_slots()}"
            )
        self._sequences[sequence_id] = sequence

    def remove(self, sequence_id: int) -> RunningSequence:
        """Remove a sequence and return it; raises InvariantBroken if it is not in the batch."""
        sequence = self.find(sequence_id)
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
        occupied = dict(self.occupied_slots())
        if slot >= old or slot in occupied:
            raise InvariantBroken(
                f"sequence {sequence_id} cannot move from slot {old} to "
                f"{slot}, occupied by {occupied.get(slot)}"
            )
        sequence.slot = slot
        return old

    def check_row_count(self, row_count: int) -> None:
        """Require every occupied slot to be below `row_count`, the number of rows in the batch.

        Raises:
            InvariantBroken: an occupied slot is not below it.
        """
        slots = [slot for slot, _ in self.occupied_slots()]
        if any(slot >= row_count for slot in slots):
            raise InvariantBroken(f"slots {slots} are occupied: {row_count} rows are too few")
