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
from services.rank_worker.sampling.grammar.masks import StepMasks
from services.rank_worker.sampling.grammar.matcher import Matcher
from services.rank_worker.sampling.sampler import SampledTokens
from shared.messages import GrammarFailure, StepPlan, TokenLogprobs
from shared.messages.telemetry.step_profile import StepProfile


@dataclasses.dataclass(frozen=True, slots=True)
class StepSample:
    """Tokens sampled in one step. A sequence with k drafts has k + 1 rows, others have one."""

    sampled: SampledTokens
    """One token per row, with each row's highest logit; log probabilities where a row asks for
    them."""
    drafts: StepDrafts
    """The drafts that the step verifies."""
    sequence_ids: list[int]
    """The sequence of each row."""
    verifications: list[DraftVerification | None]
    """One per sampling sequence, prefill first, then decodes in plan order; None for a sequence
    without drafts."""
    matchers: list[Matcher | None]
    """Like `verifications`, of sequences with a grammar."""
    masks: StepMasks | None
    """None where no sequence has a grammar."""

    def arrays(self) -> list[mx.array]:
        """Return all lazy arrays of the sample: the sampled tokens' and the proposed drafts'."""
        proposed = self.drafts.proposed_ids
        return self.sampled.arrays() + ([] if proposed is None else [proposed])


@dataclasses.dataclass(frozen=True, slots=True)
class LaterSample:
    """The sampling of a step in which a row has a grammar.

    It is built last, when the tokens of all steps before are known.
    """

    fill_masks: Callable[[], StepMasks]
    """Fills the masks on the host, where tokens are read."""
    build: Callable[[StepMasks], StepSample | None]
    """Builds the sampling with these masks."""
    logits: list[mx.array]
    """Logits of the step's forwards, which are started before."""


@dataclasses.dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step whose graph is built and whose computation may have started."""

    plan: StepPlan
    kept: list[mx.array]
    """Payloads of the blocks and checkpoints that the plan keeps, uint8 [bytes] each; computed
    before everything else."""
    rows: list[tuple[int, int, int]]
    """(slot, sequence id, length) of every occupied row after the step, in slot order."""
    sample: StepSample | None
    """None where no row samples, and while `later` is set."""
    later: LaterSample | None
    """The sampling while it is not built; None: it is, or no row samples."""
    markers: list[mx.array]
    """One small array per forward that does not sample; evaluating it runs the forward. See
    `ForwardOutputs`."""
    states: list[mx.array]
    """Arrays of the state snapshots for checkpoints; their computation starts with the sampling."""
    spills: list[PendingSpill]
    """Blocks that the plan orders to write to files."""
    expert_counts: list[mx.array]
    """Counts of assignments to experts to compute with the step; empty without new ones."""
    reads_counts: bool
    """Whether they are read when it is finished."""
    profile: StepProfile | None = None
    """Where the plan is measured part by part."""

    @property
    def ends_in_plain_decodes(self) -> bool:
        """Whether the last forward of the step decodes rows without drafts."""
        plan = self.plan
        return bool(plan.decodes) and not (plan.drafts or plan.draft_counts or self.states)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens and receipt of a finished step."""

    tokens: list[list[int]]
    """Accepted and sampled token ids of each sequence: of sampling prefill chunks, then of decodes,
    in plan order."""
    logprobs: list[list[TokenLogprobs]]
    """Like `tokens`, with an empty list where none are requested; empty if no row requests any."""
    digest: bytes
    """Receipt of the step: 16 bytes that are equal on all ranks with the same history."""
    spills: list[SpillItem]
    """Blocks to write to files, in plan order."""
    grammar_failures: list[GrammarFailure] = dataclasses.field(default_factory=list)
    """Sequences of the step whose grammars have failed."""


@dataclasses.dataclass(slots=True)
class ForwardOutputs:
    """Outputs of the forwards of one step, in the order in which they are built.

    Each forward has one output whose evaluation runs it: its logits, or a marker if it does not
    sample. A marker is a small array that depends on the last KV that the forward writes.

    Each prefill is started by itself: in one graph MLX might write a row for the next forward
    before this one has read it, which copies the whole array. Decodes are started with the
    sampling; where there are several, each depends on the previous one.
    """

    start_forward: Callable[[Sequence[mx.array]], None]
    """Starts the computation of the prefill that was built last, given its outputs."""
    logits: list[mx.array] = dataclasses.field(default_factory=list)
    """[rows, V] each, in the model's dtype."""
    sequence_ids: list[int] = dataclasses.field(default_factory=list)
    """The sequence of each row of `logits`. The rows of one sequence are adjacent."""
    markers: list[mx.array] = dataclasses.field(default_factory=list)
    """Markers of prefills that do not sample and of a drafter's forwards."""

    def start_prefill(
        self, logits: mx.array, sequence_ids: Sequence[int], marker: mx.array | None = None
    ) -> None:
        """Start a prefill that samples, and add its logits.

        Args:
            logits: [rows, V] in the model's dtype; evaluating them runs the prefill.
            sequence_ids: the sequence of each row.
            marker: as for `start_fill`, of a prefill in which some chunks do not sample: no logits
                depend on their KV in the last layer.
        """
        markers = [] if marker is None else [marker]
        self.start_forward([logits, *markers])
        self.markers += markers
        self.add_decode(logits, sequence_ids)

    def start_fill(self, marker: mx.array) -> None:
        """Start a prefill that does not sample, and add its marker.

        Args:
            marker: small array of any shape; evaluating it runs the prefill.
        """
        self.start_forward([marker])
        self.markers.append(marker)

    def add_decode(self, logits: mx.array, sequence_ids: Sequence[int]) -> None:
        """Add the logits of a decode, whose computation starts later, with the sampling.

        Args:
            logits: [rows, V] in the model's dtype.
            sequence_ids: the sequence of each row.
        """
        self.logits.append(logits)
        self.sequence_ids += sequence_ids

    def start_marker(self, marker: mx.array) -> None:
        """Start a drafter's forward now, and add its marker.

        Args:
            marker: small array of any shape; evaluating it runs the forward.
        """
        mx.async_eval(marker)
        self.markers.append(marker)

    def logits_of(self, sequence_ids: list[int]) -> mx.array:
        """Return the logits of all forwards, with the rows in a given order.

        Args:
            sequence_ids: the sequence of each row. The rows of one sequence are adjacent and keep
                their order.

        Returns:
            [rows, V], in the model's dtype.
        """
        logits = self.logits[0] if len(self.logits) == 1 else mx.concatenate(self.logits)
        if sequence_ids == self.sequence_ids:
            return logits
        places = {sequence_id: place for place, sequence_id in enumerate(sequence_ids)}
        # The sort is stable: the rows of one sequence keep their order.
        rows = sorted(range(len(self.sequence_ids)), key=lambda row: places[self.sequence_ids[row]])
        return logits[mx.array(rows, dtype=mx.int32)]
