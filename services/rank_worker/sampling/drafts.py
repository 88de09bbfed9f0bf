"""The drafts that a step verifies, whoever proposed them: counts on the host, ids on the device."""

from collections.abc import Mapping, Sequence
from typing import cast

import mlx.core as mx

from shared.messages import StepPlan


class Drafts:
    """Drafts of some sequences, those of each next to each other."""

    def __init__(self, counts: Mapping[int, int], ids: mx.array | Sequence[int]) -> None:
        """Take them in.

        Args:
            counts: by sequence id how many, none of them 0; in the order of `ids`.
            ids: what a plan says, or int32 [drafts] that may not be computed yet.
        """
        self.counts = counts
        self.proposed = ids if isinstance(ids, mx.array) else None
        """Ids that the ranks propose themselves, so that no plan holds them."""
        self._known = None if isinstance(ids, mx.array) else list(ids)
        self._firsts: dict[int, int] = {}
        total = 0
        for sequence_id, count in counts.items():
            self._firsts[sequence_id] = total
            total += count
        self.ids = ids if isinstance(ids, mx.array) else mx.array(list(ids), dtype=mx.int32)
        """int32 [drafts]."""

    @classmethod
    def of_plan(cls, plan: StepPlan) -> "Drafts":
        """Return the drafts that a plan holds."""
        by_sequence = dict(zip(plan.decodes, plan.drafts, strict=False))
        counts = {one: len(drafts) for one, drafts in by_sequence.items() if drafts}
        return cls(counts, [draft for drafts in plan.drafts for draft in drafts])

    def count(self, sequence_id: int) -> int:
        """Return how many drafts a sequence has."""
        return self.counts.get(sequence_id, 0)

    def places(self, sequence_id: int, count: int) -> range:
        """Return where the first so many drafts of a sequence lie in `ids`."""
        first = self._firsts.get(sequence_id, 0)
        return range(first, first + count)

    def padded(self, sequence_ids: Sequence[int | None]) -> mx.array:
        """Return int32 [sequence ids, longest]: each one's drafts, and any token behind them."""
        longest = max(self.count(one) for one in sequence_ids if one is not None)
        rows = []
        for one in sequence_ids:
            places = [] if one is None else list(self.places(one, self.count(one)))
            rows.append(places + [0] * (longest - len(places)))
        return self.ids[mx.array(rows, dtype=mx.int32)]

    def read(self) -> list[int]:
        """Return `ids` on the host; waits for them where ranks propose."""
        if self._known is not None:
            return self._known
        return cast("list[int]", self.ids.tolist())
