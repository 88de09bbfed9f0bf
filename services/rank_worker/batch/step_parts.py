"""What one step is made of: what its forwards gave, what was launched, what came out."""

import dataclasses
from collections.abc import Callable, Sequence

import mlx.core as mx

from services.rank_worker.kv_cache.blocks.block_executor import Spill
from services.rank_worker.kv_cache.blocks.transfer import SpillItem
from services.rank_worker.sampling import Drawn
from services.rank_worker.sampling.draft_acceptance import Verifying
from services.rank_worker.sampling.drafts import Drafts
from shared.messages import StepPlan, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class StepSample:
    """What the rows of one step draw."""

    drawn: Drawn
    drafts: Drafts
    """That some of them verify."""
    sequence_ids: list[int]
    """Whose each row is."""
    sampled: list[Verifying | None]
    """Per sequence that samples, in the order of the result: the drafts that its rows verify."""

    def arrays(self) -> list[mx.array]:
        """Return what must be evaluated."""
        proposed = self.drafts.proposed
        return self.drawn.arrays() + ([] if proposed is None else [proposed])


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A step whose computation has started."""

    plan: StepPlan
    kept: list[mx.array]
    """Blocks and checkpoints, computed before everything else."""
    rows: list[tuple[int, int, int]]
    """(slot, sequence id, length) of every occupied row after the step, in slot order."""
    draw: StepSample | None
    markers: list[mx.array]
    """Computed when all that does not sample is; those of proposers are started with the draw."""
    states: list[mx.array]
    """Set aside for checkpoints; started with the draw."""
    spills: list[Spill]
    """What the plan wants written to files."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced."""

    tokens: list[list[int]]
    """Per sampling prefill chunk in plan order, then per decode in plan order."""
    logprobs: list[list[TokenLogprobs]]
    """Empty, or as `tokens` with an empty list where none were asked for."""
    digest: bytes
    spills: list[SpillItem]
    """What the plan wants written to files, in its order."""


@dataclasses.dataclass(slots=True)
class Forwards:
    """What the forwards of one step gave. Rows that sample are in the order of computation.

    Each prefill is started by itself. In one graph MLX might evaluate the next forward's write
    before this one's reads, and a write into an array that is still to be read copies all of it.
    Decodes are started by the draw; where there are several, each depends on the one before.
    """

    start: Callable[[Sequence[mx.array]], None]
    """Starts the forward of the model that was built last, given what it ends in."""
    logits: list[mx.array] = dataclasses.field(default_factory=list)
    """[rows, vocab] each."""
    sequence_ids: list[int] = dataclasses.field(default_factory=list)
    """Whose each row is. One with drafts has several, next to each other."""
    markers: list[mx.array] = dataclasses.field(default_factory=list)
    """Of the forwards that do not sample, and of proposers."""

    def add(self, logits: mx.array, sequence_ids: Sequence[int]) -> None:
        """Take in the logits of a prefill and start computing them."""
        self.start([logits])
        self.append(logits, sequence_ids)

    def fill(self, marker: mx.array) -> None:
        """Take in what is computed once a prefill is that samples nothing, and start it."""
        self.start([marker])
        self.markers.append(marker)

    def append(self, logits: mx.array, sequence_ids: Sequence[int]) -> None:
        """Take in the logits of a decode, which the draw starts."""
        self.logits.append(logits)
        self.sequence_ids += sequence_ids

    def mark(self, marker: mx.array) -> None:
        """Take in what is computed beside the model's forwards, and start it."""
        mx.async_eval(marker)
        self.markers.append(marker)

    def follow(self, marker: mx.array) -> None:
        """Take in what is computed beside a decode, which the draw starts too."""
        self.markers.append(marker)

    def in_order(self, wanted: list[int]) -> mx.array:
        """Return the logits [rows, vocab] of rows in this order.

        Args:
            wanted: whose rows; each sequence as often as it has rows, which stay in their order.
        """
        logits = self.logits[0] if len(self.logits) == 1 else mx.concatenate(self.logits)
        if wanted == self.sequence_ids:
            return logits
        rows_of: dict[int, list[int]] = {}
        for row, sequence_id in enumerate(self.sequence_ids):
            rows_of.setdefault(sequence_id, []).append(row)
        remaining = {sequence_id: iter(rows) for sequence_id, rows in rows_of.items()}
        rows = [next(remaining[sequence_id]) for sequence_id in wanted]
        return logits[mx.array(rows, dtype=mx.int32)]
