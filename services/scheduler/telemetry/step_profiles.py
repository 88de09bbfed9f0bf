"""Profiles of steps. Owns which steps are measured part by part, and their sums. Pure."""

from collections import Counter, OrderedDict, defaultdict
from typing import Literal

import msgspec

from services.scheduler.batch.plan_builder import PlannedStep
from services.scheduler.telemetry.durations import add_counts, add_seconds
from shared.measurements.step_losses import exchanges, largest_loss
from shared.messages import MeasuredStep, OrderProfile, ProfilesReported, QueryProfiles
from shared.messages.telemetry.step_profile import Part, PartTotal, StepKind, StepProfile

STEPS_KEPT = 64
"""Measured steps whose profiles are kept."""


class StepProfiles:
    """Chooses the steps that are measured, and keeps the profiles of the last ones.

    Of each kind of step one in `every` is measured, and as many in a row as an operator orders.
    """

    def __init__(self, every: int) -> None:
        """Begin without profiles.

        Args:
            every: steps of a kind, of which one is measured; 0: only ordered ones are.
        """
        self._every = every
        self._since: Counter[StepKind] = Counter()
        """Steps of each kind since the last one that was measured."""
        self._ordered = 0
        """Steps that an operator has ordered and that were not planned yet."""
        self._counts_primitives = False
        self._steps: OrderedDict[tuple[int, int], MeasuredStep] = OrderedDict()
        """By epoch and step id; `profiles` may not have those of all ranks yet."""
        self._totals: defaultdict[int, dict[Part, PartTotal]] = defaultdict(dict)
        """Sums over all measured steps, by rank."""
        self._awaited_s: defaultdict[int, float] = defaultdict(float)
        """By rank: how long others waited in collectives for this rank, which came last."""

    def order(self, order: OrderProfile) -> None:
        """Measure the next steps that compute something, as ordered."""
        self._ordered, self._counts_primitives = order.steps, order.primitives

    def choose(self, step: PlannedStep, kind: StepKind) -> PlannedStep:
        """Return the step, with the order to measure it if it is its turn.

        Args:
            step: the step.
            kind: its kind.
        """
        if kind == "other":
            return step
        profile: Literal["", "times", "primitives"] = ""
        self._since[kind] += 1
        if self._ordered:
            self._ordered -= 1
            profile = "primitives" if self._counts_primitives else "times"
        elif self._every and self._since[kind] >= self._every:
            profile = "times"
        if not profile:
            return step
        self._since[kind] = 0
        plan = msgspec.structs.replace(step.plan, profile=profile)
        work = step.work
        self._steps[plan.epoch, plan.step_id] = MeasuredStep(
            epoch=plan.epoch,
            step_id=plan.step_id,
            kind=kind,
            prefill_tokens=work.chunk_tokens,
            decodes=work.decodes,
        )
        if len(self._steps) > STEPS_KEPT:
            self._steps.popitem(last=False)
        return msgspec.structs.replace(step, plan=plan)

    def add(self, epoch: int, profile: StepProfile, world_size: int) -> None:
        """Add a rank's profile of a step; one of an unknown step is passed over."""
        step = self._steps.get((epoch, profile.step_id))
        if step is None or any(one.rank == profile.rank for one in step.profiles):
            return
        step.profiles.append(profile)
        totals = self._totals[profile.rank]
        for part in profile.parts:
            totals[part.part] = _sum(totals.get(part.part), part)
        if len(step.profiles) == world_size > 1:
            for rank, one in exchanges(step.profiles).items():
                awaited_s = add_seconds(self._awaited_s[rank], one.awaited_s)
                self._awaited_s[rank] = awaited_s

    def totals(self, rank: int) -> list[PartTotal]:
        """Return a rank's sums over all measured steps since the scheduler's start."""
        return list(self._totals[rank].values())

    def awaited_s(self, rank: int) -> float:
        """Return how long others waited for a rank in the collectives of measured steps."""
        return self._awaited_s[rank]

    def largest_loss(self, world_size: int) -> str:
        """Return the largest loss in the kept steps, a sentence; "" before any was measured."""
        return largest_loss(self._steps.values(), world_size)

    def report(self, query: QueryProfiles) -> ProfilesReported:
        """Return the kept steps that are queried, oldest first."""
        after = query.epoch, query.step_id
        return ProfilesReported(steps=[one for key, one in self._steps.items() if key > after])


def _sum(before: PartTotal | None, more: PartTotal) -> PartTotal:
    if before is None:
        return more
    return PartTotal(
        part=more.part,
        runs=add_counts(before.runs, more.runs),
        seconds=add_seconds(before.seconds, more.seconds),
        bytes=add_counts(before.bytes, more.bytes),
        primitives=add_counts(before.primitives, more.primitives),
    )
