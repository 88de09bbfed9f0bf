"""Main loop of a rank: executes the step plans of one epoch in order and reports their results."""

import dataclasses
import queue
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import mlx.core as mx

from services.rank_worker.batch.step_outputs import LaunchedStep
from services.rank_worker.execution.executor import Executor
from services.rank_worker.execution.measurements import StepMeasurements
from services.rank_worker.kv_cache.stored.tier import StoredTier
from services.rank_worker.peers.watchdog import Watchdog
from services.rank_worker.scheduler_link import SchedulerLink
from shared import limits
from shared.clock import Clock
from shared.errors import InvariantBroken
from shared.messages import JoinWorld, StepFinished, StepPlan
from shared.messages.telemetry.step_times import StepTimes

PLAN_WAIT_MAX_S = 0.002
"""Longest wait for a plan to launch ahead; the scheduler needs 0.1 to 1 ms to send one."""

PLAN_WAIT_SHARE_MAX = 0.5
"""The wait is at most this part of the last step's duration, so that no finished step waits."""


@dataclasses.dataclass(slots=True)
class TimedStep:
    """A step whose graph is built, and its times so far, in seconds of the loop's clock."""

    launched: LaunchedStep
    came_s: float
    """Its plan arrived."""
    built_s: float
    """Its graph was built."""
    is_started: bool = False
    """Its first layers were started while the previous step was being computed."""
    handed_over_s: float = 0.0
    """All its work was handed to the device."""
    idle_s: float = 0.0
    """The device had no work for this time before it."""


@dataclasses.dataclass(slots=True)
class StepLoop:
    """Takes step plans from the scheduler link in order, executes them and reports their results.

    On a GPU up to two steps are launched and not finished. On a CPU it is one, during which the
    graph of the next step is built.
    """

    order: JoinWorld
    """Epoch and rank."""
    executor: Executor
    link: SchedulerLink
    """Gives plans and sends receipts."""
    tier: StoredTier
    """Writes spilled blocks."""
    watchdog: Watchdog
    """Ends the process when a step takes too long."""
    clock: Clock
    """Measures durations."""
    measurements: StepMeasurements
    """Gets the times of each step."""
    on_cpu: bool = dataclasses.field(kw_only=True)
    """Whether the model runs on the CPU."""
    on_first_step: Callable[[], None] | None = None
    """Called once, when the first receipt is sent."""
    _held_plan: StepPlan | None = None
    """A plan taken from the queue that must wait until the previous step is finished."""
    _launched: deque[TimedStep] = dataclasses.field(default_factory=deque)
    """Steps on the device."""
    _launching_plan: StepPlan | None = None
    """The plan that is being launched."""
    _step_id: int = 0
    _device_start_s: float = 0.0
    """When the device could start the oldest launched step."""
    _finished_at_s: float | None = None
    _busy_s: float = 0.0
    """Duration of the last step that computed something."""

    def run(self) -> NoReturn:
        """Execute plans and send a receipt for each, until the process ends."""
        # On a CPU `async_eval` returns when a step is nearly done. Launching a second step would
        # delay the result of the first by a whole step; building its graph meanwhile costs nothing.
        launched_max = 1 if self.on_cpu else limits.PLANS_IN_FLIGHT
        while True:
            if len(self._launched) < launched_max:
                plan = self._next_plan()
                if plan is not None:
                    self._launch(plan)
                    continue
            self._finish()

    def _next_plan(self) -> StepPlan | None:
        """Return the next plan; None if a step is on the device and no plan comes in time."""
        if self._held_plan is not None:
            if self._launched and self.executor.waits_for_earlier_steps(self._held_plan):
                return None
            plan, self._held_plan = self._held_plan, None
            return plan
        if not self._launched:
            return self._check(self.link.orders.get())
        # While this thread waits for a result it launches no new plan, and the device would
        # idle until the next graph is built. So it waits for plans first, for a time in which the
        # device is surely busy.
        until_s = self._device_start_s + min(PLAN_WAIT_MAX_S, PLAN_WAIT_SHARE_MAX * self._busy_s)
        wait_s = max(0.0, until_s - self.clock.now())
        try:
            plan = self._check(self.link.orders.get(block=wait_s > 0.0, timeout=wait_s))
        except queue.Empty:
            return None
        if self.executor.waits_for_earlier_steps(plan):
            self._held_plan = plan
            return None
        return plan

    def _check(self, order: JoinWorld | StepPlan) -> StepPlan:
        if not isinstance(order, StepPlan) or order.epoch != self.order.epoch:
            raise InvariantBroken(
                f"Expected a step plan of epoch {self.order.epoch}, got {type(order).__name__}."
            )
        if order.step_id != self._step_id + 1:
            raise InvariantBroken(
                f"Step plan {order.step_id} came after {self._step_id}: ids must be consecutive."
            )
        self._step_id = order.step_id
        return order

    def _launch(self, plan: StepPlan, prepared: TimedStep | None = None) -> None:
        now_s = self.clock.now()
        idle_s = 0.0
        self._launching_plan = plan
        if not self._launched:
            if prepared is None or not prepared.is_started:
                # A step whose first layers were started is computed since the previous step ended.
                idle_s = now_s - (self._finished_at_s or now_s)
                self._device_start_s = now_s
            self.watchdog.start_step(plan.step_id, plan.deadline_s)
        self.link.step_started = plan.step_id
        if prepared is None:
            # The launch finishes the previous step when the device has enough work of this one,
            # so that its tokens are sent while the rest of this step is started.
            prepared = self._build(plan, self._finish_oldest if self._launched else None)
        self.executor.start(prepared.launched)
        prepared.handed_over_s = self.clock.now()
        prepared.idle_s = idle_s
        self._launched.append(prepared)
        self._launching_plan = None

    def _build(
        self, plan: StepPlan, finish_before: Callable[[], object] | None = None
    ) -> TimedStep:
        came_s = self.link.arrivals_s.popleft()
        launched = self.executor.prepare(plan, finish_before)
        return TimedStep(launched, came_s, built_s=self.clock.now())

    def _prepare_next(self) -> TimedStep | None:
        """Build the graph of the next plan while the device computes, if the plan only decodes.

        Its first layers are started too, so that the device has work while the result of the
        previous step is read and sent (2 to 4 % of a small model's step). More would delay that
        result.
        """
        try:
            plan = self._check(self.link.orders.get(block=False))
        except queue.Empty:
            return None
        if plan.prefill_chunks or plan.draft_chunks or plan.profile:
            # These are computed while they are built, which takes longer than the current step.
            self._held_plan = plan
            return None
        prepared = self._build(plan)
        prepared.is_started = self.executor.start_first_layers(prepared.launched)
        return prepared

    def _finish(self) -> None:
        prepared = self._prepare_next() if self.on_cpu else None
        self._finish_oldest()
        if prepared is not None:
            self._launch(prepared.launched.plan, prepared)

    def _finish_oldest(self) -> None:
        step = self._launched.popleft()
        plan = step.launched.plan
        result = self.executor.finish(step.launched)
        now_s, began_s = self.clock.now(), self._device_start_s
        busy_s = now_s - began_s
        if plan.prefill_chunks or plan.decodes:
            # Other steps take no time and must not shorten the wait for the next plan.
            self._busy_s = busy_s
        self._device_start_s = self._finished_at_s = now_s
        next_plan = self._launched[0].launched.plan if self._launched else self._launching_plan
        if next_plan is not None:
            self.watchdog.start_step(next_plan.step_id, next_plan.deadline_s)
        else:
            self.watchdog.set_idle()
        is_primary = self.order.rank == 0
        # Before the receipt is sent, so that no round trip seems to take less time than it does.
        times = StepTimes(
            step.came_s, step.built_s, step.handed_over_s, began_s, now_s, self.clock.now()
        )
        self.link.send(
            StepFinished(
                epoch=plan.epoch,
                step_id=plan.step_id,
                rank=self.order.rank,
                digest=result.digest,
                tokens=result.tokens if is_primary else [],
                logprobs=result.logprobs if is_primary else [],
                grammar_failures=result.grammar_failures if is_primary else [],
                busy_ms=busy_s * 1e3,
                idle_ms=step.idle_s * 1e3,
                memory_bytes=mx.get_active_memory(),
            )
        )
        self.measurements.add(plan.step_id, times, step.launched.profile)
        self.link.step_finished = plan.step_id
        if self.on_first_step is not None:
            on_first_step, self.on_first_step = self.on_first_step, None
            on_first_step()
        if plan.spill is not None:
            self.tier.spill(plan.spill, result.spills)
