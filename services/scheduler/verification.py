"""Drafts in plans: chosen before a plan is made, cut back to what was accepted after its receipt.

A sequence with drafts in flight is in no other plan's forward, because its tokens are not known.
Its row counts all drafts until the next plan names the real length (`rolled_back`), so that what
ranks hold follows from plans alone.
"""

import dataclasses
from collections.abc import Iterable

from services.scheduler.sequence import Sequence
from services.scheduler.speculation.drafting import Drafting
from services.scheduler.speculation.speculator import DecodingRow, PlannedDrafts, Speculator
from services.scheduler.step import PlannedStep
from shared.identifiers import SequenceId
from shared.messages import RolledBack
from shared.settings import SpeculationConfig


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenDrafts:
    """What the plan in the making may verify."""

    by_sequence: dict[SequenceId, list[int]]
    """Of those that have any."""

    @property
    def longest(self) -> int:
        """Most drafts of one sequence."""
        return max(map(len, self.by_sequence.values()), default=0)


NO_DRAFTS = ChosenDrafts({})


class Verification:
    """Between the running sequences and the speculator."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._speculator = Speculator(config)
        self._can_roll_back = False
        self._rolled_back: list[RolledBack] = []

    def begin_epoch(self, *, can_roll_back: bool) -> None:
        """Begin with nothing in flight; without roll-back nobody gets drafts."""
        self._can_roll_back = can_roll_back
        self._speculator.begin_epoch()
        self._rolled_back.clear()

    def look_ahead(self, running: Iterable[Sequence]) -> None:
        """Index prompts that are being computed, a slice at a time."""
        waiting = [self._drafting_of(one) for one in running if not one.is_decoding]
        self._speculator.look_ahead([one for one in waiting if one is not None])

    def choose(self, decoding: list[Sequence]) -> ChosenDrafts | None:
        """Return what the next plan verifies; None: no plan may be made yet.

        Args:
            decoding: who may decode.
        """
        draftings = [self._drafting_of(one) for one in decoding]
        if not any(one is not None for one in draftings):
            return NO_DRAFTS
        rows = [
            DecodingRow(drafting, one.samples_in_flight, one.tokens_max - len(one.tokens))
            for one, drafting in zip(decoding, draftings, strict=True)
        ]
        planned = self._speculator.choose(rows)
        if planned.holds:
            return None
        found = zip(decoding, planned.drafts, strict=True) if planned.drafts else ()
        return ChosenDrafts({one.sequence_id: drafts for one, drafts in found if drafts})

    def planned(self, drafts: PlannedDrafts) -> bool:
        """Note that a plan was made with these drafts; return whether it had been held back."""
        return self._can_roll_back and self._speculator.planned(drafts)

    def verified(self, sequence: Sequence, proposed: int, emitted: int, taken: int) -> None:
        """Take in what became of a running sequence's drafts.

        Args:
            sequence: whose.
            proposed: drafts that the plan had for it.
            emitted: tokens that the receipt has for it, one more than were accepted.
            taken: tokens of these that became part of the completion.
        """
        sequence.planned += emitted - proposed - 1
        sequence.is_verifying = False
        self._rolled_back.append(
            RolledBack(sequence_id=sequence.sequence_id, length=sequence.planned)
        )
        if sequence.drafting is not None:
            self._speculator.verified(sequence.drafting, proposed, emitted, taken)

    def finished(self, step: PlannedStep, busy_ms: float, idle_ms: float) -> None:
        """Take in what a step has cost."""
        if self._can_roll_back:
            self._speculator.finished(step.width, busy_ms, idle_ms, held=step.was_held)

    def take_rolled_back(self) -> list[RolledBack]:
        """Return the rows to cut back with the plan that leaves now, once."""
        taken, self._rolled_back = self._rolled_back, []
        return taken

    def report_counters(self) -> dict[str, float]:
        """Return monotonic sums since start."""
        return self._speculator.counters.report()

    def _drafting_of(self, sequence: Sequence) -> Drafting | None:
        if not sequence.has_drafting:
            sequence.has_drafting = True
            wish = sequence.request.speculation
            sequence.drafting = self._speculator.drafting(sequence.tokens, wish)
        return sequence.drafting if self._can_roll_back else None
