"""Outputs of one step: of its forwards, of its sampling, and of the whole step.

V is the number of token ids in the vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence

import mlx.core as mx

from services.rank_worker.kv_cache.blocks.block_executor import PendingSpill
from services.rank_worker.kv_cache.blocks.items import SpillItem
from services.rank_worker.sampling.draft_acceptance import DraftVerification
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.sampler import SampledTokens
from shared.messages import StepPlan, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class StepSample:
    """Sampling of one step: one row per token, k + 1 rows for a sequence with k drafts."""

    sampled: SampledTokens
    drafts: StepDrafts
    """The drafts that the step verifies."""
    sequence_ids: list[int]
    """The sequence of each row."""
    verifications: list[DraftVerification | None]
    """One per sampling sequence, in the order of the result; None where it has no drafts."""

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate."""
        proposed = self.drafts.proposed_ids
        return self.sampled.arrays() + ([] if proposed is None else [proposed])


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose graph is built and whose computation may have started."""

    plan: StepPlan
    kept: list[mx.array]
    """Kept blocks and checkpoints, computed before everything else."""
    rows: list[tuple[int, int, int]]
    """(slot, sequence id, length) of every occupied row after the step, in slot order."""
    sample: StepSample | None
    """None where no row samples."""
    markers: list[mx.array]
    """One array per forward that does not sample, evaluated with it; see `ForwardOutputs`."""
    states: list[mx.array]
    """State snapshots for checkpoints; started with the sampling."""
    spills: list[PendingSpill]
    """Blocks that the plan orders to write to files."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens and receipt of a finished step."""

    tokens: list[list[int]]
    """Per sampling prefill chunk, then per decode, both in plan order."""
    logprobs: list[list[TokenLogprobs]]
    """Like `tokens`, with an empty list where none are requested; empty if no row requests any."""
    digest: bytes
    spills: list[SpillItem]
    """Blocks to write to files, in plan order."""


@dataclasses.dataclass(slots=True)
class ForwardOutputs:
    """Outputs of the forwards of one step, in the order in which they are built.

    A marker is a small array that is evaluated when a forward is. Each prefill is started by
    itself: in one graph MLX might write a row for the next forward before this one has read it,
    which copies the whole array. Decodes are started with the sampling; where there are several,
    each depends on the previous one.
    """

    start_forward: Callable[[Sequence[mx.array]], None]
    """Starts the model forward that was built last, given its outputs."""
    logits: list[mx.array] = dataclasses.field(default_factory=list)
    """[rows, V] each, in the model's dtype."""
    sequence_ids: list[int] = dataclasses.field(default_factory=list)
    """The sequence of each row of `logits`. The rows of one sequence are adjacent."""
    markers: list[mx.array] = dataclasses.field(default_factory=list)
    """Arrays to evaluate for forwards that do not sample, and for those of a drafter."""

    def start_prefill(self, logits: mx.array, sequence_ids: Sequence[int]) -> None:
        """Add the logits [rows, V] of a prefill that samples, and start it."""
        self.start_forward([logits])
        self.add_decode(logits, sequence_ids)

    def start_fill(self, marker: mx.array) -> None:
        """Add the marker of a prefill that does not sample, and start it."""
        self.start_forward([marker])
        self.markers.append(marker)

    def add_decode(self, logits: mx.array, sequence_ids: Sequence[int]) -> None:
        """Add the logits [rows, V] of a decode, which starts with the sampling."""
        self.logits.append(logits)
        self.sequence_ids += sequence_ids

    def start_marker(self, marker: mx.array) -> None:
        """Add the marker of a forward of a drafter, and start it."""
        mx.async_eval(marker)
        self.markers.append(marker)

    def add_marker(self, marker: mx.array) -> None:
        """Add the marker of a forward of a drafter, which starts with the sampling."""
        self.markers.append(marker)

    def logits_of(self, sequence_ids: list[int]) -> mx.array:
        """Return the logits of rows in a given order.

        Args:
            sequence_ids: the sequence of each row; each occurs as often as it has rows, which keep
                their order.

        Returns:
            [rows, V], in the model's dtype.
        """
        logits = self.logits[0] if len(self.logits) == 1 else mx.concatenate(self.logits)
        if sequence_ids == self.sequence_ids:
            return logits
        rows_of: dict[int, list[int]] = {}
        for row, sequence_id in enumerate(self.sequence_ids):
            rows_of.setdefault(sequence_id, []).append(row)
        remaining = {sequence_id: iter(rows) for sequence_id, rows in rows_of.items()}
        rows = [next(remaining[sequence_id]) for sequence_id in sequence_ids]
        return logits[mx.array(rows, dtype=mx.int32)]
