"""What one step is made of: what its forwards gave, what was launched, what came out."""

import dataclasses
from collections.abc import Sequence

import mlx.core as mx

from services.rank_worker.blocks.resident import Resident
from services.rank_worker.blocks.transfer import SpillItem
from services.rank_worker.sampling import Drawn
from shared.messages import StepPlan, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A step whose computation has started."""

    plan: StepPlan
    kept: list[mx.array]
    """Blocks and checkpoints, computed before everything else."""
    rows: list[tuple[int, int, int]]
    """(slot, sequence id, length) of every occupied row after the step, in slot order."""
    sampled: int
    """Rows that sample."""
    drawn: Drawn | None
    markers: list[mx.array]
    """Computed when all that does not sample is."""
    states: list[mx.array]
    """Set aside for checkpoints; started with the draw."""
    spills: list[tuple[bytes, Resident]]
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

    Each forward is started by itself. In one graph MLX might evaluate the next forward's write
    before this one's reads, and a write into an array that is still to be read copies all of it.
    """

    logits: list[mx.array] = dataclasses.field(default_factory=list)
    """[rows, vocab] each."""
    sequence_ids: list[int] = dataclasses.field(default_factory=list)
    markers: list[mx.array] = dataclasses.field(default_factory=list)
    """Of the forwards that do not sample."""

    def add(self, logits: mx.array, sequence_ids: Sequence[int]) -> None:
        """Take in the logits of a prefill and start computing them."""
        mx.async_eval(logits)
        self.logits.append(logits)
        self.sequence_ids += sequence_ids

    def in_order(self, wanted: list[int]) -> mx.array:
        """Return the logits of these sequences, [sequences, vocab]; they are all there, once."""
        logits = self.logits[0] if len(self.logits) == 1 else mx.concatenate(self.logits)
        if wanted == self.sequence_ids:
            return logits
        rows = [self.sequence_ids.index(sequence_id) for sequence_id in wanted]
        return logits[mx.array(rows, dtype=mx.int32)]
