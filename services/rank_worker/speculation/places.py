"""Drafts are made place by place: the first of all rows, then the second of those that go on."""

from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.batch.running_batch import RunningSequence
from services.rank_worker.sampling import Sampler
from services.rank_worker.sampling.drafts import Drafts
from services.rank_worker.sampling.penalties import Uncounted
from services.rank_worker.speculation.proposer import Share


class Places:
    """The drafts of one step while they are made."""

    def __init__(
        self, sequences: Sequence[RunningSequence], lengths: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Start.

        Args:
            sequences: those that decode.
            lengths: tokens in the row of each.
            counts: drafts of each, some less than 1.
        """
        self._sequences = sequences
        self._lengths = lengths
        self._counts = counts
        self._steps: list[mx.array] = []
        """int32 [sequences that have more than n drafts] for n = 0, 1, ..., in their order."""

    @property
    def last(self) -> mx.array:
        """The drafts that were made last, int32 [sequences that have so many]."""
        return self._steps[-1]

    def drawing(self) -> list[int]:
        """Return the indices of sequences that have a draft at the next place."""
        place = len(self._steps)
        return [index for index, count in enumerate(self._counts) if count > place]

    def draw(self, logits: mx.array, sampler: Sampler) -> None:
        """Draw the drafts of the next place.

        Args:
            logits: [drawing, any vocab].
            sampler: draws as it will draw what they are compared with.
        """
        drawing = self.drawing()
        ids = [self._sequences[index].sequence_id for index in drawing]
        # As in the model's row: a token's position is the number of tokens before it.
        positions = [self._lengths[index] + len(self._steps) + 1 for index in drawing]
        uncounted = self._before(drawing) if sampler.penalizes(ids) else None
        self._steps.append(sampler.guess(logits, ids, positions, uncounted))

    def drafts(self, share: Share) -> Drafts:
        """Return all of them, shared with the other ranks at once."""
        if not self._steps:
            return Drafts({}, [])
        starts = [0]
        for step in self._steps:
            starts.append(starts[-1] + step.shape[0])
        passed = [0] * len(self._steps)
        """How many sequences before this one have a draft in each step."""
        indices: list[int] = []
        counts: dict[int, int] = {}
        for sequence, count in zip(self._sequences, self._counts, strict=True):
            for place in range(count):
                indices.append(starts[place] + passed[place])
                passed[place] += 1
            if count > 0:
                counts[sequence.sequence_id] = count
        ids = mx.concatenate(self._steps)
        return Drafts(counts, share(ids[mx.array(indices, dtype=mx.int32)]))

    def _before(self, drawing: Sequence[int]) -> Uncounted | None:
        """Return the drafts before the next place, for rows that penalties look back from."""
        rows: list[int] = []
        tokens: list[mx.array] = []
        for place, step in enumerate(self._steps):
            drew = [index for index, count in enumerate(self._counts) if count > place]
            numbers = {index: number for number, index in enumerate(drew)}
            rows += range(len(drawing))
            tokens.append(step[mx.array([numbers[index] for index in drawing], dtype=mx.int32)])
        return Uncounted(rows, mx.concatenate(tokens)) if rows else None


def to_input(values: mx.array, slots: Sequence[int], input_slots: Sequence[int]) -> mx.array:
    """Put one value per slot into the rows of a forward's input; any value in holes.

    Args:
        values: [slots, ...].
        slots: whose each is.
        input_slots: slot of each row of the input.
    """
    if list(slots) == list(input_slots):
        return values
    numbers = {slot: number for number, slot in enumerate(slots)}
    return values[mx.array([numbers.get(slot, 0) for slot in input_slots], dtype=mx.int32)]
