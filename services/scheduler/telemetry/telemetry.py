"""Telemetry of the scheduler. Owns the history of steps and the sums of each rank. Pure.

No decision depends on it.
"""

import dataclasses
from collections import defaultdict

import msgspec

from services.scheduler.batch.plan_builder import PlannedStep
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.telemetry.block_transfers import BlockTransferHistory
from services.scheduler.telemetry.durations import Durations, add_seconds
from services.scheduler.telemetry.event_log import EventLog
from services.scheduler.telemetry.expert_loads import ExpertLoads
from services.scheduler.telemetry.step_history import StepHistory, StepRecord
from services.scheduler.telemetry.step_profiles import StepProfiles
from services.scheduler.world.world import World
from shared import limits
from shared.messages import (
    DurationCounts,
    HeadExchanges,
    MeasuredStep,
    QueryProfiles,
    RankStatus,
    RecordedGateway,
    StepFinished,
    StepsMeasured,
    TraceReported,
)
from shared.messages.base import Sharding

HEAD_COUNTERS = HeadExchanges.__struct_fields__
"""Names of the counts of a divided head."""
_RECEIPTS_MAX = 1_000
"""Receipts after which their times are added up, if no status has asked before. Together they take
less time than one by one, since the processor then has the code and the sums at hand."""


@dataclasses.dataclass(slots=True)
class _RankTotals:
    """One rank: sums in seconds since the scheduler's start, and its last report."""

    busy_s: float = 0.0
    idle_s: float = 0.0
    late_s: float = 0.0
    peak_bytes: int = 0
    cached_bytes: int = 0
    heard_at_s: float | None = None
    """When its last message arrived."""


class Telemetry:
    """The history of the last steps, and sums of each rank since the scheduler's start."""

    def __init__(self, profile_every_steps: int, sharding: Sharding = "none") -> None:
        """Begin without steps.

        Args:
            profile_every_steps: of how many steps of a kind one is measured part by part; 0: none.
            sharding: how the model is split.
        """
        self.history = StepHistory()
        self.profiles = StepProfiles(profile_every_steps)
        self.durations = Durations()
        self.events = EventLog()
        self.experts = ExpertLoads(sharding)
        self.head = dict.fromkeys((f"head_{name}_total" for name in HEAD_COUNTERS), 0.0)
        """How steps were sampled from a divided head, by reported name."""
        self.block_transfers = BlockTransferHistory()
        self._ranks: defaultdict[int, _RankTotals] = defaultdict(_RankTotals)
        self._finished: list[StepRecord] = []
        """Steps that were not measured part by part and whose durations are not counted yet."""
        self._busy_and_idle_ms: list[tuple[int, float, float]] = []
        """Rank, busy and idle milliseconds of receipts that are not in its sums yet."""

    def hear(self, rank: int, now_s: float) -> None:
        """Note that a message of a rank has arrived."""
        self._ranks[rank].heard_at_s = now_s

    def begin_step(self, planned: PlannedStep, now_s: float) -> PlannedStep:
        """Note a step whose plan is being sent; return it, with the order to measure it if due."""
        return self.profiles.choose(planned, self.history.add(planned, now_s).kind)

    def add_receipt(
        self, rank: int, receipt: StepFinished, now_s: float, *, has_requests: bool
    ) -> None:
        """Add a rank's receipt.

        Args:
            rank: the rank.
            receipt: its receipt.
            now_s: when it arrived.
            has_requests: requests were open before the step; if not, the device rightly idled.
        """
        record = self.history.find(receipt.epoch, receipt.step_id)
        if record is not None:
            record.received_at_s[rank] = now_s
        idle_ms = receipt.idle_ms if has_requests else 0.0
        self._busy_and_idle_ms.append((rank, receipt.busy_ms, idle_ms))

    def finish_step(self, planned: PlannedStep, receipt: StepFinished, now_s: float) -> None:
        """Note that all receipts of a step agree.

        Args:
            planned: the step.
            receipt: of the primary rank.
            now_s: when the last one arrived.
        """
        record = self.history.find(receipt.epoch, receipt.step_id)
        if record is None:
            return
        record.finished_at_s, record.busy_ms = now_s, receipt.busy_ms
        if not planned.plan.profile:
            self._finished.append(record)
        if len(self._busy_and_idle_ms) >= _RECEIPTS_MAX:
            self._add_up()

    def add_report(self, rank: int, message: StepsMeasured, world_size: int) -> None:
        """Add what a rank of the present epoch has measured.

        Args:
            rank: the rank.
            message: its report.
            world_size: number of ranks.
        """
        totals = self._ranks[rank]
        totals.peak_bytes, totals.cached_bytes = message.peak_bytes, message.cached_bytes
        if rank == 0:
            # Every rank samples every step in the same way.
            for name in HEAD_COUNTERS:
                self.head[f"head_{name}_total"] += getattr(message.head, name)
        self.experts.add(message.epoch, rank, message.experts, world_size)
        for step in self.history.measure(rank, message):
            # The report of the last rank completes a step, so each counts once.
            if len(step.times) == world_size:
                self._add_lateness(step)
        for profile in message.profiles:
            if profile.rank == rank:
                self.profiles.add(message.epoch, profile, world_size)

    def report_durations(self) -> list[DurationCounts]:
        """Return the durations of steps and requests since the scheduler's start."""
        self._add_up()
        return self.durations.report()

    def complete(self, status: RankStatus, now_s: float) -> RankStatus:
        """Add sums, memory and clock to a rank's status."""
        self._add_up()
        totals = self._ranks[status.rank]
        clock = self.history.offsets.find(status.rank)
        heard_at_s = totals.heard_at_s
        known = msgspec.structs.replace(
            status,
            busy_s=totals.busy_s,
            idle_s=totals.idle_s,
            late_s=totals.late_s,
            awaited_s=self.profiles.awaited_s(status.rank),
            parts=self.profiles.totals(status.rank),
            assignments=self.experts.own(status.rank),
            foreign_assignments=self.experts.foreign(status.rank),
            silence_s=max(0.0, now_s - heard_at_s) if heard_at_s is not None else 0.0,
        )
        if clock is None:
            # Its process has not reported in this epoch.
            return known
        return msgspec.structs.replace(
            known,
            peak_bytes=totals.peak_bytes,
            cached_bytes=totals.cached_bytes,
            clock_offset_s=clock.offset_s,
            clock_error_s=clock.error_s,
        )

    def trace(
        self,
        since_s: float,
        requests: RequestTable,
        world: World,
        gateways: list[RecordedGateway],
        now_s: float,
    ) -> TraceReported:
        """Return all that is known of what happened after a time.

        Args:
            since_s: the time.
            requests: the open requests, with the history of others.
            world: the ranks.
            gateways: what gateways have recorded.
            now_s: the monotonic time in seconds.
        """
        steps = self.history.report(since_s, world.size)
        first = (steps[0].epoch, steps[0].step_id - 1) if steps else (0, 0)
        after = QueryProfiles(epoch=first[0], step_id=max(0, first[1]))
        clocks = [self.history.offsets.find(rank) for rank in range(world.size)]
        return TraceReported(
            now_s=now_s,
            since_s=since_s,
            hosts=[one.host for one in world.statuses()],
            clock_offsets_s=[one.offset_s if one is not None else 0.0 for one in clocks],
            steps=steps,
            requests=requests.history.report(requests, since_s),
            measured=_bounded(self.profiles.report(after).steps) if steps else [],
            block_transfers=self.block_transfers.report(since_s),
            gateways=gateways,
        )

    def _add_up(self) -> None:
        for record in self._finished:
            self.durations.observe("step", record.busy_ms / 1e3, record.kind)
        self._finished.clear()
        for rank, busy_ms, idle_ms in self._busy_and_idle_ms:
            totals = self._ranks[rank]
            totals.busy_s = add_seconds(totals.busy_s, busy_ms / 1e3)
            totals.idle_s = add_seconds(totals.idle_s, idle_ms / 1e3)
        self._busy_and_idle_ms.clear()

    def _add_lateness(self, step: StepRecord) -> None:
        ended_s = {rank: times.ended_s for rank, times in step.times.items()}
        first_s = min(ended_s.values())
        for rank, time_s in ended_s.items():
            totals = self._ranks[rank]
            totals.late_s = add_seconds(totals.late_s, time_s - first_s)


def _bounded(steps: list[MeasuredStep]) -> list[MeasuredStep]:
    """Return the last steps whose spans fit one report."""
    found: list[MeasuredStep] = []
    size_bytes = 0
    for step in reversed(steps):
        size_bytes += sum(len(one.spans) for one in step.profiles)
        if size_bytes > limits.RECORDED_SPANS_BYTES_MAX:
            break
        found.append(step)
    return found[::-1]
