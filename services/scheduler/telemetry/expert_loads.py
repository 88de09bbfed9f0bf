"""Loads of routed experts. Owns the assignments to each expert since the scheduler's start. Pure.

An assignment is a pair of a token and an expert that it is routed to.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from shared.measurements.expert_balance import (
    expert_imbalance,
    loads_of_ranges,
    rank_imbalance,
)
from shared.messages import ExpertLayer, ExpertRange, LayerAssignments
from shared.messages.base import Sharding
from shared.model.sharding.shares import DIVIDES_EXPERTS

_COUNT_MAX = 2**60
"""Sums stop there, below the largest number in a message; no working rank reaches it."""


@dataclasses.dataclass(slots=True)
class _Layer:
    counts: list[int]
    """Assignments to each expert."""
    ranges: dict[int, ExpertRange] = dataclasses.field(default_factory=dict)
    """By rank, in the present epoch."""


class ExpertLoads:
    """Assignments to experts by layer, and to each rank's experts, since the scheduler's start."""

    def __init__(self, sharding: Sharding) -> None:
        """Begin without any.

        Args:
            sharding: how the model is split. With "tensor" every rank holds a part of each expert,
                and only rank 0 reports; divided by experts, every rank has some of each layer.
        """
        self._sharding = sharding
        self._epoch = 0
        self._layers: dict[int, _Layer] = {}
        self._own: Counter[int] = Counter()
        self._foreign: Counter[int] = Counter()
        self._gauges: dict[str, float] = {}

    def add(
        self, epoch: int, rank: int, layers: Sequence[LayerAssignments], world_size: int
    ) -> None:
        """Add a rank's report of the present epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            for known in self._layers.values():
                known.ranges.clear()
        ranks = range(world_size)
        holders = list(ranks) if self._sharding == "tensor" else [rank]
        others = [one for one in ranks if one != rank] if self._sharding in DIVIDES_EXPERTS else []
        for one in layers:
            self._add_layer(one, holders)
            new = sum(one.counts)
            for holder in holders:
                self._own[holder] = min(_COUNT_MAX, self._own[holder] + new)
            for other in others:
                self._foreign[other] = min(_COUNT_MAX, self._foreign[other] + new)
        if layers:
            self._gauges = self._compute_gauges()

    def own(self, rank: int) -> int:
        """Return the assignments to experts that a rank held."""
        return self._own[rank]

    def foreign(self, rank: int) -> int:
        """Return the assignments to other ranks' experts in layers that are divided by experts."""
        return self._foreign[rank]

    def gauges(self) -> dict[str, float]:
        """Return the imbalance of ranks and experts, by reported name; {} before any report."""
        return self._gauges

    def report(self) -> list[ExpertLayer]:
        """Return all layers in their order."""
        return [
            ExpertLayer(
                layer=number,
                counts=list(layer.counts),
                ranges=[layer.ranges[rank] for rank in sorted(layer.ranges)],
            )
            for number, layer in sorted(self._layers.items())
        ]

    def _add_layer(self, new: LayerAssignments, holders: Sequence[int]) -> None:
        layer = self._layers.get(new.layer)
        if layer is None or len(layer.counts) != new.experts:
            layer = self._layers[new.layer] = _Layer([0] * new.experts)
        for expert, count in enumerate(new.counts, new.first):
            layer.counts[expert] = min(_COUNT_MAX, layer.counts[expert] + count)
        if new.counts:
            for rank in holders:
                layer.ranges[rank] = ExpertRange(rank=rank, first=new.first, count=len(new.counts))

    def _compute_gauges(self) -> dict[str, float]:
        layers = self._layers.values()
        by_rank = [loads_of_ranges(one.counts, one.ranges.values()) for one in layers]
        return {
            "expert_rank_imbalance": rank_imbalance(by_rank),
            "expert_rank_imbalance_worst": max(rank_imbalance([one]) for one in by_rank),
            "expert_imbalance_worst": max(expert_imbalance(layer.counts) for layer in layers),
        }
