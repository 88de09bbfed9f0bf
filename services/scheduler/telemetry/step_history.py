"""History of the last steps. Owns what each had to do and what each rank measured in it. Pure."""

from collections import OrderedDict

from msgspec import Struct

from services.scheduler.batch.plan_builder import PlannedStep
from services.scheduler.telemetry.clock_offsets import ClockOffsets
from shared import limits
from shared.messages import RecordedStep, StepsMeasured
from shared.messages.telemetry.step_profile import StepKind
from shared.messages.telemetry.step_times import PackedTimes, microseconds_of, pack

STEPS_KEPT = 16_384
"""Steps in the history: some minutes, about 8 MB with two ranks."""


class StepRecord(Struct):
    """One step. Times are the scheduler's monotonic seconds."""

    epoch: int
    step_id: int
    kind: StepKind
    prefill_tokens: int
    decodes: int
    drafts: int
    sent_at_s: float
    """The plan was sent."""
    received_at_s: dict[int, float] = {}
    """When each rank's receipt arrived."""
    finished_at_s: float | None = None
    """The receipts of all ranks agreed; None: not yet, or the epoch ended before."""
    times: dict[int, PackedTimes] = {}
    """By rank: its times by the scheduler's clock. They come up to a second after the receipt."""


def kind_of(planned: PlannedStep) -> StepKind:
    """Return the kind of a planned step."""
    plan = planned.plan
    if plan.prefill_chunks:
        return "prefill"
    if planned.has_drafts:
        return "verify"
    return "decode" if plan.decodes else "other"


class StepHistory:
    """The last steps of all epochs, oldest first, bounded in number."""

    def __init__(self) -> None:
        self.offsets = ClockOffsets()
        """Clocks of the present epoch's ranks."""
        self._epoch = 0
        self._records: OrderedDict[tuple[int, int], StepRecord] = OrderedDict()
        """By epoch and step id."""

    def add(self, planned: PlannedStep, now_s: float) -> StepRecord:
        """Add a step whose plan is being sent at `now_s`; return its record."""
        plan = planned.plan
        if plan.epoch != self._epoch:
            # Other processes, which may run on other hosts.
            self._epoch, self.offsets = plan.epoch, ClockOffsets()
        drafts = 0
        if planned.has_drafts:
            drafts = sum(max(0, one) for one in plan.draft_counts) + sum(map(len, plan.drafts))
        record = self._records[plan.epoch, plan.step_id] = StepRecord(
            epoch=plan.epoch,
            step_id=plan.step_id,
            kind=kind_of(planned),
            prefill_tokens=planned.work.chunk_tokens,
            decodes=planned.work.decodes,
            drafts=drafts,
            sent_at_s=now_s,
        )
        if len(self._records) > STEPS_KEPT:
            self._records.popitem(last=False)
        return record

    def receive(self, epoch: int, step_id: int, rank: int, now_s: float) -> None:
        """Note when a rank's receipt has arrived."""
        if (record := self._records.get((epoch, step_id))) is not None:
            record.received_at_s[rank] = now_s

    def finish(self, epoch: int, step_id: int, now_s: float) -> StepRecord | None:
        """Note that all receipts of a step agree; return its record, None if it is too old."""
        record = self._records.get((epoch, step_id))
        if record is not None:
            record.finished_at_s = now_s
        return record

    def measure(self, rank: int, message: StepsMeasured) -> list[StepRecord]:
        """Add what a rank of the present epoch has measured.

        Returns:
            The steps in the message that are known, in order; `times` has the rank's times.
        """
        # Hundreds of steps a second arrive together, so each is looked at once and not unpacked.
        found = []
        for place, microseconds in enumerate(microseconds_of(message.times)):
            record = self._records.get((message.epoch, message.first_step_id + place))
            if record is not None:
                found.append((record, place, microseconds))
        origin_s = message.origin_s
        self.offsets.add_report(
            rank,
            [
                (
                    record.sent_at_s,
                    origin_s + microseconds[0] / 1e6,
                    origin_s + microseconds[-1] / 1e6,
                    record.received_at_s[rank],
                )
                for record, _, microseconds in found
                if rank in record.received_at_s
            ],
        )
        clock = self.offsets.find(rank)
        if clock is not None:
            origin_s -= clock.offset_s
        for record, place, _ in found:
            record.times[rank] = PackedTimes(message.times, place, origin_s)
        return [record for record, _, _ in found]

    def since(self, after: tuple[int, int]) -> list[StepRecord]:
        """Return the steps after this one (epoch, step id), oldest first."""
        newer: list[StepRecord] = []
        for key in reversed(self._records):
            if key <= after:
                break
            newer.append(self._records[key])
        return newer[::-1]

    def report(self, since_s: float, world_size: int) -> list[RecordedStep]:
        """Return the steps whose plans were sent after a time, oldest first.

        Args:
            since_s: the time. Of more than `limits.RECORDED_STEPS_MAX` steps the last ones are
                returned.
            world_size: number of ranks.
        """
        found = [one for one in self._records.values() if one.sent_at_s > since_s]
        return [_recorded(one, world_size) for one in found[-limits.RECORDED_STEPS_MAX :]]

    def complete_since(self, after: tuple[int, int], world_size: int) -> list[RecordedStep]:
        """Return the steps that all ranks have reported, oldest first.

        Args:
            after: (epoch, step id); only steps after this one are returned, and of more than
                `limits.ACTIVITY_STEPS_MAX` the last ones.
            world_size: number of ranks.
        """
        complete = [one for one in self.since(after) if len(one.times) == world_size]
        return [_recorded(one, world_size) for one in complete[-limits.ACTIVITY_STEPS_MAX :]]


def _recorded(step: StepRecord, world_size: int) -> RecordedStep:
    times = [step.times.get(rank) for rank in range(world_size)]
    return RecordedStep(
        epoch=step.epoch,
        step_id=step.step_id,
        kind=step.kind,
        prefill_tokens=step.prefill_tokens,
        decodes=step.decodes,
        drafts=step.drafts,
        sent_at_s=step.sent_at_s,
        finished_at_s=step.finished_at_s,
        ranks=[pack([one.unpack()], step.sent_at_s) if one else b"" for one in times],
    )
