"""Drafts that one step verifies. Owns their order; does not propose or accept any."""

import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import mlx.core as mx

from shared.messages import StepPlan


class StepDrafts:
    """The drafts that one step verifies: token ids and their number by sequence."""

    def __init__(self, counts: Mapping[int, int], ids: mx.array | Sequence[int]) -> None:
        """Collect the drafts.

        Args:
            counts: number of drafts by sequence id, all above 0, in the order of `ids`.
            ids: the plan's token ids, or an int32 array [drafts] that may not be computed yet.
        """
        self.counts = counts
        """Number of drafts by sequence id, all above 0."""
        self.proposed_ids = ids if isinstance(ids, mx.array) else None
        """`ids` where the ranks propose the drafts; None where the plan holds them."""
        self._host_ids = None if isinstance(ids, mx.array) else list(ids)
        starts = itertools.accumulate(counts.values(), initial=0)
        self._offsets = dict(zip(counts, starts, strict=False))
        self.ids = ids if isinstance(ids, mx.array) else mx.array(list(ids), dtype=mx.int32)
        """int32 [drafts], on the device."""

    @classmethod
    def from_plan(cls, plan: StepPlan) -> "StepDrafts":
        """Return the drafts that a plan holds for its decodes; none if ranks propose them."""
        by_sequence = dict(zip(plan.decodes, plan.drafts, strict=False))
        counts = {one: len(drafts) for one, drafts in by_sequence.items() if drafts}
        return cls(counts, [draft for drafts in plan.drafts for draft in drafts])

    def count(self, sequence_id: int) -> int:
        """Return the number of drafts of a sequence; 0 if it has none."""
        return self.counts.get(sequence_id, 0)

    def index_range(self, sequence_id: int, count: int) -> range:
        """Return where the first `count` drafts of a sequence are: their indices in `self.ids`."""
        start = self._offsets.get(sequence_id, 0)
        return range(start, start + count)

    def padded_ids(self, sequence_ids: Sequence[int | None]) -> mx.array:
        """Return the drafts of each sequence, padded with any token.

        Args:
            sequence_ids: of the rows; None is a row without drafts.

        Returns:
            int32 [rows, longest].
        """
        rows = [
            [] if one is None else list(self.index_range(one, self.count(one)))
            for one in sequence_ids
        ]
        longest = max(map(len, rows))
        padded = [row + [0] * (longest - len(row)) for row in rows]
        return self.ids[mx.array(padded, dtype=mx.int32)]

    def read_ids(self) -> list[int]:
        """Return all draft ids on the host. Waits for the device where the ranks propose them."""
        if self._host_ids is not None:
            return self._host_ids
        return cast("list[int]", self.ids.tolist())
