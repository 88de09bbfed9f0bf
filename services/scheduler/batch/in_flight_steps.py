"""Plans in flight of an epoch. Owns collecting and comparing their receipts (I6). Pure."""

import itertools
from collections import deque

from msgspec import Struct

from services.scheduler.batch.plan_builder import PlannedStep
from shared.identifiers import StepId
from shared.messages import StepFinished, TokenLogprobs


class InFlightStep(Struct):
    """A step whose plan was sent and whose receipts are not complete."""

    planned: PlannedStep
    receipts: dict[int, StepFinished] = {}
    """By rank."""

    @property
    def step_id(self) -> int:
        """Number of the step in its epoch."""
        return self.planned.plan.step_id


class InFlightSteps:
    """The plans in flight of one epoch, oldest first, with the receipts that arrived for each.

    Steps finish in the order of their plans.
    """

    def __init__(self) -> None:
        self.next_step_id = StepId(1)
        self.finished_step_id = 0
        """Number of the last finished step; 0: none has finished."""
        self._steps: deque[InFlightStep] = deque()
        self._late_step_id = 0
        """Number of the last step that was reported as late; 0: none was."""
        self._progress_at_s = 0.0
        """When a step finished last, or the oldest plan was sent to idle ranks."""

    def __len__(self) -> int:
        """Return the number of plans in flight."""
        return len(self._steps)

    @property
    def tokens(self) -> int:
        """Tokens that all plans in flight compute: of prompts, decodes and drafts."""
        plans = [step.planned.plan for step in self._steps]
        return sum(
            sum(chunk.length for chunk in plan.prefill_chunks)
            + len(plan.decodes)
            + sum(map(len, plan.drafts))
            + sum(max(0, count) for count in plan.draft_counts)
            for plan in plans
        )

    def add(self, planned: PlannedStep, now_s: float) -> None:
        """Add a plan that is being sent.

        Args:
            planned: the plan.
            now_s: when it is sent; its deadline counts from then if no other plan is in flight.
        """
        if not self._steps:
            self._progress_at_s = now_s
        self._steps.append(InFlightStep(planned))
        self.next_step_id = StepId(self.next_step_id + 1)

    def has_receipt(self, rank: int, receipt: StepFinished) -> bool:
        """Tell whether this receipt was received before, or its step has finished.

        Args:
            rank: the rank that sent it.
            receipt: the receipt.
        """
        if receipt.step_id <= self.finished_step_id:
            return True
        for step in self._steps:
            if (known := step.receipts.get(rank)) is not None and known == receipt:
                return True
        return False

    def add_receipt(self, rank: int, receipt: StepFinished) -> str | None:
        """Add a rank's receipt to its step.

        Args:
            rank: the rank that sent it.
            receipt: the receipt.

        Returns:
            A sentence if it names another rank, is a second one for its step, or its step was never
            planned, else None.
        """
        if receipt.rank != rank:
            return f"Rank {rank} answered as rank {receipt.rank}."
        for step in self._steps:
            if step.step_id == receipt.step_id:
                if rank in step.receipts:
                    return f"Rank {rank} sent two receipts for step {receipt.step_id}."
                step.receipts[rank] = receipt
                return None
        return f"Rank {rank} sent a receipt for step {receipt.step_id}, which was never planned."

    def pop_finished(self, world_size: int, now_s: float) -> InFlightStep | None:
        """Remove and return the oldest step if it has all receipts, else None.

        Args:
            world_size: number of ranks, each of which sends one receipt.
            now_s: the monotonic time in seconds; the deadline of the next step counts from then.
        """
        if not self._steps or len(self._steps[0].receipts) < world_size:
            return None
        self._progress_at_s = now_s
        step = self._steps.popleft()
        self.finished_step_id = step.step_id
        return step

    def newly_late_step(self, now_s: float) -> dict[str, object] | None:
        """Return facts of the oldest step, once, when half of its deadline is over at `now_s`."""
        step = self._steps[0] if self._steps else None
        if step is None or step.step_id == self._late_step_id:
            return None
        deadline_s = step.planned.plan.deadline_s
        if now_s - self._progress_at_s <= deadline_s / 2.0:
            return None
        self._late_step_id = step.step_id
        return {
            "step_id": step.step_id,
            "seconds": round(now_s - self._progress_at_s, 1),
            "deadline_s": round(deadline_s, 1),
            "answered": sorted(step.receipts),
        }

    def overdue_reason(self, now_s: float) -> str | None:
        """Return a sentence if the oldest step has passed its deadline at `now_s`, else None."""
        if not self._steps:
            return None
        step = self._steps[0]
        deadline_s = step.planned.plan.deadline_s
        if now_s - self._progress_at_s <= deadline_s:
            return None
        answered = sorted(step.receipts)
        return (
            f"Step {step.step_id} was not finished within {deadline_s:.1f} s "
            f"(ranks that answered: {answered or 'none'})."
        )

    def extend_deadlines(self, seconds: float, now_s: float) -> None:
        """Postpone the deadline of the oldest step after a time in which no receipts were read.

        Args:
            seconds: how long the scheduler did not run, by which the deadline is postponed.
            now_s: the monotonic time in seconds; the step's time counts anew from then at the
                latest.
        """
        self._progress_at_s = min(now_s, self._progress_at_s + seconds)

    def stalled_s(self, now_s: float) -> float:
        """Return the seconds since the last progress; 0 with nothing in flight.

        Progress is a finished step, or a plan sent to idle ranks.
        """
        return now_s - self._progress_at_s if self._steps else 0.0


def find_disagreement(step: InFlightStep, vocabulary_size: int) -> str | None:
    """Compare the receipts of a step with each other and with its plan.

    The digests of all ranks must be equal. Rank 0 must report for each sample at least one token
    and at most one more than its drafts, only token ids of the vocabulary, and log probabilities
    for all tokens of a sample or for no token.

    Args:
        step: a step with the receipts of all ranks.
        vocabulary_size: number of token ids; each id is below it.

    Returns:
        A sentence about the first difference or impossible value; None: the receipts are good.
    """
    if len({receipt.digest for receipt in step.receipts.values()}) > 1:
        receipts = sorted(step.receipts.items())
        named = ", ".join(f"rank {rank} {one.digest.hex()[:8]}" for rank, one in receipts)
        return f"The receipts of step {step.step_id} differ: {named}."
    primary = step.receipts[0]
    counts_max = _tokens_max(step.planned)
    counts = list(map(len, primary.tokens))
    # Most steps have one token per sample.
    if counts != counts_max and (
        len(counts) != len(counts_max) or not all(map(_is_between_one_and, counts, counts_max))
    ):
        return f"Step {step.step_id} sampled {counts_max} tokens at most, rank 0 reports {counts}."
    if max(itertools.chain.from_iterable(primary.tokens), default=0) >= vocabulary_size:
        return f"Step {step.step_id} sampled a token id that is not below {vocabulary_size}."
    if primary.logprobs and not _fits_counts(primary.logprobs, counts):
        return f"Step {step.step_id} has log probabilities of other tokens than it sampled."
    return None


def _tokens_max(planned: PlannedStep) -> list[int]:
    """Return the most tokens of each of a step's samples: one, and one more for each draft."""
    if not planned.has_drafts:
        return [1] * len(planned.samples)
    return [1 + planned.drafts_of(sample) for sample in range(len(planned.samples))]


def _is_between_one_and(count: int, count_max: int) -> bool:
    return 1 <= count <= count_max


def _fits_counts(logprobs: list[list[TokenLogprobs]], counts: list[int]) -> bool:
    """Tell whether there is one entry per sample, empty or as long as the sample's tokens."""
    return len(logprobs) == len(counts) and all(
        len(entry) in (0, count) for entry, count in zip(logprobs, counts, strict=True)
    )
