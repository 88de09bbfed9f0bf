"""Building of the drafts of one step: the first draft of all rows, then the second, and so on.

Does not compute logits; the drafters do.
"""

from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.batch.running_batch import RunningSequence
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.penalties import UncountedTokens
from services.rank_worker.sampling.sampler import Sampler, SynchronizeIds


class DraftBuilder:
    """Samples the drafts of one step from a drafter's logits and joins them.

    Each call of `sample_next` gives one more draft to every sequence that is to have more.
    """

    def __init__(
        self, sequences: Sequence[RunningSequence], lengths: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Start without drafts.

        Args:
            sequences: those that decode.
            lengths: tokens in the model's row of each.
            counts: number of drafts to sample for each; 0 or less: none.
        """
        self._sequences = sequences
        self._lengths = lengths
        self._counts = counts
        self._drafts_by_index: list[mx.array] = []
        """For n = 0, 1, ...: draft n of every sequence that has more than n, int32 [those]."""

    @property
    def last_drafts(self) -> mx.array:
        """Token ids from the last `sample_next`: int32, one per row that it sampled."""
        return self._drafts_by_index[-1]

    def next_rows(self) -> list[int]:
        """Return which sequences get another draft: indices in the constructor's `sequences`."""
        return self._rows_with(len(self._drafts_by_index))

    def _rows_with(self, draft_index: int) -> list[int]:
        return [index for index, count in enumerate(self._counts) if count > draft_index]

    def sample_next(self, logits: mx.array, sampler: Sampler, *, of_part: bool = False) -> None:
        """Sample the next draft of each row in `next_rows`.

        Args:
            logits: as for `Sampler.sample_drafts`.
            sampler: samples with the same settings and keys as the tokens that verify the drafts.
            of_part: as for `Sampler.sample_drafts`.
        """
        next_rows = self.next_rows()
        ids = [self._sequences[index].sequence_id for index in next_rows]
        # The position of a token is the number of tokens before it in the model's row.
        positions = [self._lengths[index] + len(self._drafts_by_index) + 1 for index in next_rows]
        uncounted = self._preceding_drafts(next_rows) if sampler.penalizes(ids) else None
        self._drafts_by_index.append(
            sampler.sample_drafts(logits, ids, positions, uncounted, of_part=of_part)
        )

    def build(self, synchronize: SynchronizeIds) -> StepDrafts:
        """Return all drafts of the step, grouped by sequence.

        Args:
            synchronize: makes the ids equal on all ranks; called once for all drafts.
        """
        if not self._drafts_by_index:
            return StepDrafts({}, [])
        starts = [0]
        for drafts in self._drafts_by_index:
            starts.append(starts[-1] + drafts.shape[0])
        used = [0] * len(self._drafts_by_index)
        """For each n, how many of the previous sequences have a draft n."""
        indices: list[int] = []
        counts: dict[int, int] = {}
        for sequence, count in zip(self._sequences, self._counts, strict=True):
            for draft_index in range(count):
                indices.append(starts[draft_index] + used[draft_index])
                used[draft_index] += 1
            if count > 0:
                counts[sequence.sequence_id] = count
        ids = mx.concatenate(self._drafts_by_index)
        return StepDrafts(counts, synchronize(ids[mx.array(indices, dtype=mx.int32)]))

    def _preceding_drafts(self, next_rows: Sequence[int]) -> UncountedTokens | None:
        """Return the drafts before the next one, for penalties."""
        rows: list[int] = []
        tokens: list[mx.array] = []
        for draft_index, drafts in enumerate(self._drafts_by_index):
            rows_before = self._rows_with(draft_index)
            numbers = [rows_before.index(index) for index in next_rows]
            rows += range(len(next_rows))
            tokens.append(drafts[mx.array(numbers, dtype=mx.int32)])
        return UncountedTokens(rows, mx.concatenate(tokens)) if rows else None


def gather_input_rows(
    values: mx.array, slots: Sequence[int], input_slots: Sequence[int]
) -> mx.array:
    """Arrange one value per slot in the rows of a forward's input; any value where a slot is empty.

    Args:
        values: [slots, ...] of any dtype.
        slots: the slot of each value.
        input_slots: the slot of each row of the input.

    Returns:
        [input rows, ...] in the dtype of `values`.
    """
    if list(slots) == list(input_slots):
        return values
    numbers = {slot: number for number, slot in enumerate(slots)}
    return values[mx.array([numbers.get(slot, 0) for slot in input_slots], dtype=mx.int32)]
