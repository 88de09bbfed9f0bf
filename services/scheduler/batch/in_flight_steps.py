"""Plans whose receipts are not back, and the comparison of receipts (I6). Pure."""

import dataclasses
from collections import deque

from services.scheduler.batch.plan_builder import PlannedStep
from shared.identifiers import StepId
from shared.messages import StepFinished, TokenLogprobs


@dataclasses.dataclass(slots=True)
class InFlightStep:
    """One plan at the ranks."""

    step: PlannedStep
    sent_at_s: float
    receipts: dict[int, StepFinished] = dataclasses.field(default_factory=dict)

    @property
    def step_id(self) -> int:
        """Number of the step."""
        return self.step.plan.step_id


class InFlightSteps:
    """The plans in flight of one epoch, oldest first. Steps finish in order or not at all."""

    def __init__(self) -> None:
        self.next_step_id = StepId(1)
        self.finished = 0
        self._flights: deque[InFlightStep] = deque()
        self._progress_at_s = 0.0

    def __len__(self) -> int:
        """Return how many plans are in flight."""
        return len(self._flights)

    def launch(self, step: PlannedStep, now_s: float) -> None:
        """Remember a plan that is being sent."""
        if not self._flights:
            self._progress_at_s = now_s
        self._flights.append(InFlightStep(step, now_s))
        self.next_step_id = StepId(self.next_step_id + 1)

    def has(self, rank: int, receipt: StepFinished) -> bool:
        """Tell whether this receipt, or one of a step that is finished, came before."""
        if receipt.step_id <= self.finished:
            return True
        return any(flight.receipts.get(rank) == receipt for flight in self._flights)

    def receive(self, rank: int, receipt: StepFinished) -> str | None:
        """File a receipt. Returns what is wrong with it, or None."""
        if receipt.rank != rank:
            return f"Rank {rank} answered as rank {receipt.rank}."
        for flight in self._flights:
            if flight.step_id == receipt.step_id:
                if rank in flight.receipts:
                    return f"Rank {rank} sent two receipts for step {receipt.step_id}."
                flight.receipts[rank] = receipt
                return None
        return f"Rank {rank} sent a receipt for step {receipt.step_id}, which was never planned."

    def pop_finished(self, world_size: int, now_s: float) -> InFlightStep | None:
        """Return the oldest flight once every rank's receipt is there, else None."""
        if not self._flights or len(self._flights[0].receipts) < world_size:
            return None
        self._progress_at_s = now_s
        flight = self._flights.popleft()
        self.finished = flight.step_id
        return flight

    def overdue(self, now_s: float) -> str | None:
        """Return which step has passed its deadline, or None."""
        if not self._flights:
            return None
        flight = self._flights[0]
        deadline_s = flight.step.plan.deadline_s
        waited_s = now_s - self._progress_at_s
        if waited_s <= deadline_s:
            return None
        done = sorted(flight.receipts)
        return (
            f"Step {flight.step_id} was not finished within {deadline_s:.1f} s "
            f"(ranks that answered: {done or 'none'})."
        )

    def extend_deadlines(self, seconds: float, now_s: float) -> None:
        """Do not count a time in which nobody here could take in receipts."""
        self._progress_at_s = min(now_s, self._progress_at_s + seconds)

    def stalled_s(self, now_s: float) -> float:
        """Return for how long the oldest plan has made no progress; 0 when nothing is in flight."""
        return now_s - self._progress_at_s if self._flights else 0.0


def disagreement(flight: InFlightStep, vocabulary: int) -> str | None:
    """Return how the receipts of a finished flight differ, or what is impossible in them, or None.

    Args:
        flight: one whose receipts are all there.
        vocabulary: token ids are below it.
    """
    digests = {rank: receipt.digest for rank, receipt in flight.receipts.items()}
    if len(set(digests.values())) > 1:
        named = ", ".join(f"rank {rank} {digests[rank].hex()[:8]}" for rank in sorted(digests))
        return f"The receipts of step {flight.step_id} differ: {named}."
    primary = flight.receipts[0]
    most = _tokens_max(flight.step)
    counts = [len(tokens) for tokens in primary.tokens]
    if len(counts) != len(most) or not all(map(_is_between_one_and, counts, most)):
        return f"Step {flight.step_id} sampled {most} tokens at most, rank 0 reports {counts}."
    if any(token >= vocabulary for tokens in primary.tokens for token in tokens):
        return f"Step {flight.step_id} sampled a token id that is not below {vocabulary}."
    if primary.logprobs and not _belong(primary.logprobs, counts):
        return f"Step {flight.step_id} has log probabilities of other tokens than it sampled."
    return None


def _tokens_max(step: PlannedStep) -> list[int]:
    """Return how many tokens each of a step's samples may have: more than one where drafts are."""
    if not step.has_drafts:
        return [1] * len(step.samples)
    return [1 + step.drafts_of(sample) for sample in range(len(step.samples))]


def _is_between_one_and(count: int, most: int) -> bool:
    return 1 <= count <= most


def _belong(logprobs: list[list[TokenLogprobs]], counts: list[int]) -> bool:
    """Tell whether there is one entry per sample, empty or as long as its tokens."""
    return len(logprobs) == len(counts) and all(
        len(entry) in (0, count) for entry, count in zip(logprobs, counts, strict=True)
    )
