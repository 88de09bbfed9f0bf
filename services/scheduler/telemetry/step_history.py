"""History of the last steps. Owns what each had to do and what each rank measured in it. Pure."""

from collections import deque

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
    busy_ms: float = 0.0
    """Milliseconds in which the primary rank's device computed, from its receipt."""
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
    """The last steps of all epochs, oldest first, bounded in number.

    The steps of an epoch have consecutive numbers.
    """

    def __init__(self) -> None:
        self.offsets = ClockOffsets()
        """Clocks of the present epoch's ranks."""
        self._epoch = 0
        self._records: deque[StepRecord] = deque(maxlen=STEPS_KEPT)

    def add(self, planned: PlannedStep, now_s: float) -> StepRecord:
        """Add a step whose plan is being sent at `now_s`; return its record."""
        plan, work = planned.plan, planned.work
        if plan.epoch != self._epoch:
            # Other processes, which may run on other hosts.
            self._epoch, self.offsets = plan.epoch, ClockOffsets()
        drafts = 0
        if planned.has_drafts:
            drafts = sum(max(0, one) for one in plan.draft_counts) + sum(map(len, plan.drafts))
        record = StepRecord(
            plan.epoch,
            plan.step_id,
            kind_of(planned),
            work.chunk_tokens,
            work.decodes,
            drafts,
            now_s,
        )
        self._records.append(record)
        return record

    def find(self, epoch: int, step_id: int) -> StepRecord | None:
        """Return the record of a step; None: it is too old, or unknown."""
        if not self._records:
            return None
        # Steps of other epochs than the present one are not asked for.
        place = len(self._records) - 1 - (self._records[-1].step_id - step_id)
        if not 0 <= place < len(self._records):
            return None
        record = self._records[place]
        return record if (record.epoch, record.step_id) == (epoch, step_id) else None

    def measure(self, rank: int, message: StepsMeasured) -> list[StepRecord]:
        """Add what a rank of the present epoch has measured.

        Returns:
            The steps in the message that are known, in order; `times` has the rank's times.
        """
        # Hundreds of steps a second arrive together, so each is looked at once and not unpacked.
        found = []
        for place, microseconds in enumerate(microseconds_of(message.times)):
            record = self.find(message.epoch, message.first_step_id + place)
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
        for record in reversed(self._records):
            if (record.epoch, record.step_id) <= after:
                break
            newer.append(record)
        return newer[::-1]

    def report(self, since_s: float, world_size: int) -> list[RecordedStep]:
        """Return the steps whose plans were sent after a time, oldest first.

        Args:
            since_s: the time. Of more than `limits.RECORDED_STEPS_MAX` steps the last ones are
                returned.
            world_size: number of ranks.
        """
        found = [one for one in self._records if one.sent_at_s > since_s]
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
