"""Sampling of one step: positions of new tokens, and acceptance of drafts.

Does not compute tokens from logits; `Sampler` does.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx

from services.rank_worker.batch.running_batch import RunningSequence, SequenceBatch
from services.rank_worker.batch.step_outputs import (
    ForwardOutputs,
    LaterSample,
    LaunchedStep,
    StepSample,
)
from services.rank_worker.kv_cache.rows.interface import KVStore
from services.rank_worker.profiling.step_profiler import StepParts
from services.rank_worker.sampling.draft_acceptance import DraftVerification, count_accepted
from services.rank_worker.sampling.drafts import StepDrafts
from services.rank_worker.sampling.grammar.masks import MaskedSequence, MaskFiller, StepMasks
from services.rank_worker.sampling.sampler import Sampler
from shared.errors import InvariantBroken
from shared.messages import StepPlan, TokenLogprobs


@dataclasses.dataclass(slots=True)
class StepSampling:
    """Builds the sampling of each step from the logits of its forwards."""

    batch: SequenceBatch
    """The running sequences, which are updated. Their new tokens stay on the device."""
    store: KVStore
    """The rows, as the step leaves them."""
    sampler: Sampler
    """Samples tokens from the logits."""
    mask_filler: MaskFiller = dataclasses.field(init=False)
    """Fills the masks where a sequence has a grammar."""
    mask_thread: ThreadPoolExecutor = dataclasses.field(init=False)
    """Runs `fill_masks` while the device computes."""

    def __post_init__(self) -> None:
        """Start the threads that fill masks."""
        self.mask_filler = MaskFiller(self.sampler.vocabulary.size)
        self.mask_thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def sequences(self, plan: StepPlan) -> list[RunningSequence]:
        """Return the sequences that a plan samples: those of prefill chunks, then the decodes."""
        sampling = [one.sequence_id for one in plan.prefill_chunks if one.samples]
        return [self.batch.find(one) for one in sampling + plan.decodes]

    def build_if_known(
        self, plan: StepPlan, forwards: ForwardOutputs, drafts: StepDrafts, parts: StepParts
    ) -> tuple[StepSample | None, LaterSample | None]:
        """Build the sampling, unless it needs tokens of earlier steps that are not known yet.

        Args:
            plan: the step.
            forwards: outputs of its forwards.
            drafts: the drafts that its decodes verify.
            parts: measures the step; if it does, all earlier steps have ended.

        Returns:
            (the sample as of `build`, None), or (None, what builds it later).
        """
        masks = None
        if any(sequence.matcher is not None for sequence in self.sequences(plan)):
            later = LaterSample(
                fill_masks=functools.partial(self.fill_masks, plan, forwards, drafts),
                build=functools.partial(self.build, plan, forwards, drafts),
                logits=forwards.logits,
            )
            if not parts.is_measured:
                return None, later
            with parts.part("masks"):
                masks = later.fill_masks()
        with parts.part("sampling"):
            sample = self.build(plan, forwards, drafts, masks)
            parts.wait(sample.arrays() if sample is not None else [])
        return sample, None

    def build(
        self,
        plan: StepPlan,
        forwards: ForwardOutputs,
        drafts: StepDrafts,
        masks: StepMasks | None = None,
    ) -> StepSample | None:
        """Build the sampling; set each sequence's last token, or the drafts it verifies.

        Args:
            plan: the step.
            forwards: outputs of its forwards.
            drafts: the drafts that its decodes verify.
            masks: of its rows; None: no sequence has a grammar.

        Returns:
            The sample, whose arrays are not computed yet; None if no row samples.
        """
        sequences = self.sequences(plan)
        if not sequences:
            return None
        sequence_ids: list[int] = []
        positions: list[int] = []
        for sequence in sequences:
            rows = drafts.count(sequence.sequence_id) + 1
            # The position of a new token is the number of tokens before it, which the row holds.
            length = self.store.length(sequence.slot)
            sequence_ids += [sequence.sequence_id] * rows
            positions += range(length - rows + 1, length + 1)
        sampled = self.sampler.sample(
            forwards.logits_of(sequence_ids),
            sequence_ids,
            positions,
            drafts,
            None if masks is None else masks.exclusions,
        )
        verifications = self._note_sampled(sequences, drafts, sampled.tokens)
        matchers = [sequence.matcher for sequence in sequences]
        return StepSample(sampled, drafts, sequence_ids, verifications, matchers, masks)

    def fill_masks(self, plan: StepPlan, forwards: ForwardOutputs, drafts: StepDrafts) -> StepMasks:
        """Fill the masks of a step in which a sequence has a grammar.

        The tokens of all earlier steps must be known. Uses the device only where the ranks propose
        drafts.
        """
        # Drafts that the ranks propose are computed before the forward that verifies them.
        draft_ids = drafts.read_ids() if drafts.counts else []
        masked = []
        for sequence in self.sequences(plan):
            indices = drafts.index_range(sequence.sequence_id, drafts.count(sequence.sequence_id))
            ids = [draft_ids[index] for index in indices]
            masked.append(MaskedSequence(sequence.sequence_id, sequence.matcher, ids))
        return self.mask_filler.fill(masked, forwards.logits[0].dtype)

    def _note_sampled(
        self, sequences: Sequence[RunningSequence], drafts: StepDrafts, tokens: mx.array
    ) -> list[DraftVerification | None]:
        """Set each sequence's last token, or the drafts it verifies, and return the latter."""
        verifications: list[DraftVerification | None] = []
        first_index = 0
        for sequence in sequences:
            draft_count = drafts.count(sequence.sequence_id)
            if draft_count:
                base_length = self.store.length(sequence.slot) - draft_count - 1
                sequence.verification = DraftVerification(
                    base_length, draft_count, tokens, first_index
                )
            else:
                sequence.last_token = (tokens, first_index)
            verifications.append(sequence.verification)
            first_index += draft_count + 1
        return verifications


def read_sample(
    launched: LaunchedStep, sample: StepSample
) -> tuple[list[list[int]], list[list[TokenLogprobs]], list[float]]:
    """Wait for the sampled tokens; return each sequence's accepted drafts and the token after them.

    Matchers of grammars take these tokens.

    Args:
        launched: the step, named in errors.
        sample: its sample.

    Returns:
        (token ids per sequence, log probabilities per sequence, highest logits): sequences are in
        the order of `sample.verifications`; the flat list of logits has one entry per returned
        token. The list of log probabilities is empty if no row asks for any.

    Raises:
        InvariantBroken: the logits of a row are not finite.
    """
    mx.eval(sample.arrays())
    all_tokens: list[int] = sample.sampled.tokens.tolist()  # type: ignore[assignment]
    all_top_logits: list[float] = sample.sampled.top_logits.tolist()  # type: ignore[assignment]
    if not all(map(math.isfinite, all_top_logits)):
        raise InvariantBroken(
            f"logits of step {launched.plan.step_id} are not finite: "
            f"the highest of each row are {all_top_logits}"
        )
    pending = sample.sampled.logprobs
    row_logprobs = pending.read(len(all_tokens)) if pending is not None else None
    draft_ids = sample.drafts.read_ids()
    tokens: list[list[int]] = []
    logprobs: list[list[TokenLogprobs]] = []
    top_logits: list[float] = []
    start = 0
    for verification, matcher in zip(sample.verifications, sample.matchers, strict=True):
        draft_count, accepted = 0, 0
        if verification is not None:
            draft_count = verification.draft_count
            indices = sample.drafts.index_range(sample.sequence_ids[start], draft_count)
            drafts = [draft_ids[index] for index in indices]
            accepted = count_accepted(drafts, all_tokens[start : start + draft_count + 1])
            verification.accepted = accepted
        stop = start + accepted + 1
        tokens.append(all_tokens[start:stop])
        if matcher is not None:
            matcher.take(tokens[-1])
        top_logits += all_top_logits[start:stop]
        if row_logprobs is not None:
            logprobs.append([entry for row in row_logprobs[start:stop] for entry in row])
        start += draft_count + 1
    return tokens, logprobs, top_logits
