"""Executes the plans of one epoch in order, as many at once as the device can hide."""

import dataclasses
import queue
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import mlx.core as mx

from services.rank_worker.execution.executor import Executor, Launched
from services.rank_worker.kv_cache.stored import StoredTier
from services.rank_worker.scheduler_link import SchedulerLink
from services.rank_worker.watchdog import Watchdog
from shared import limits
from shared.clock import Clock
from shared.errors import InvariantBroken
from shared.messages import JoinWorld, StepFinished, StepPlan

PATIENCE_S = 0.002
"""Longest wait for a plan to launch ahead; an answer takes the scheduler 0.1 to 1 ms."""

PATIENCE_SHARE = 0.5
"""And no longer than this part of the last step, so that a finished step is not kept waiting."""


@dataclasses.dataclass(frozen=True, slots=True)
class Following:
    """What was built of the next step while the one before was still computed."""

    launched: Launched
    is_begun: bool
    """Its first layers have been started."""


class StepLoop:
    """Executes plans in order: two on the device, or one and the graph of the next on a CPU."""

    def __init__(
        self,
        order: JoinWorld,
        executor: Executor,
        bus: SchedulerLink,
        tier: StoredTier,
        watchdog: Watchdog,
        clock: Clock,
        *,
        on_cpu: bool,
        first_done: Callable[[], None] | None = None,
    ) -> None:
        """Take what steps need.

        Args:
            order: which epoch and rank.
            executor: computes.
            bus: gives plans and takes receipts.
            tier: writes blocks.
            watchdog: ends the process when a step takes too long.
            clock: measures.
            on_cpu: see `_builds_ahead`.
            first_done: called once, after the receipt of the first step.
        """
        self._first_done = first_done
        self._order = order
        self._executor = executor
        self._bus = bus
        self._tier = tier
        self._watchdog = watchdog
        self._clock = clock
        # The CPU backend's `async_eval` returns when a step is nearly done. Launching a second one
        # there would hold back the result of the first by a whole step; building its graph in the
        # meantime costs nothing.
        self._builds_ahead = on_cpu
        self._launched_max = 1 if on_cpu else limits.PLANS_IN_FLIGHT
        self._held: StepPlan | None = None
        """A plan that was taken from the queue and must wait for the one before it."""
        self._launched: deque[tuple[StepPlan, Launched, float]] = deque()
        """Plans on the device, what `Executor.launch` gave, and the idle seconds before each."""
        self._launching: StepPlan | None = None
        """The plan that is being launched."""
        self._step_id = 0
        self._began_at_s = 0.0
        """When the device could begin the oldest launched step."""
        self._finished_at_s: float | None = None
        self._busy_s = 0.0
        """How long the last step took that computed something."""

    def run(self) -> NoReturn:
        """Take plans and finish them, for ever."""
        while True:
            if len(self._launched) < self._launched_max:
                plan = self._next_plan()
                if plan is not None:
                    self._launch(plan)
                    continue
            self._finish()

    def _next_plan(self) -> StepPlan | None:
        """Return the next plan; while a step is on the device, None if none comes in time."""
        if self._held is not None:
            if self._launched and self._executor.waits(self._held):
                return None
            held, self._held = self._held, None
            return held
        if not self._launched:
            return self._checked(self._bus.orders.get())
        # Waiting for a result also means not launching what arrives meanwhile, and the device would
        # then wait for the next graph to be built. So plans go first, for as long as the device is
        # surely not done.
        until_s = self._began_at_s + min(PATIENCE_S, PATIENCE_SHARE * self._busy_s)
        wait_s = max(0.0, until_s - self._clock.now())
        try:
            plan = self._checked(self._bus.orders.get(block=wait_s > 0.0, timeout=wait_s))
        except queue.Empty:
            return None
        if self._executor.waits(plan):
            self._held = plan
            return None
        return plan

    def _checked(self, order: JoinWorld | StepPlan) -> StepPlan:
        if not isinstance(order, StepPlan) or order.epoch != self._order.epoch:
            raise InvariantBroken(f"Not a plan of epoch {self._order.epoch}: {type(order)}.")
        if order.step_id != self._step_id + 1:
            raise InvariantBroken(f"Plan {order.step_id} came after plan {self._step_id}.")
        self._step_id = order.step_id
        return order

    def _launch(self, plan: StepPlan, following: Following | None = None) -> None:
        now_s = self._clock.now()
        idle_s = 0.0
        self._launching = plan
        if not self._launched:
            if following is None or not following.is_begun:
                # What was begun is computed since the step before it ended.
                idle_s = now_s - (self._finished_at_s or now_s)
                self._began_at_s = now_s
            self._watchdog.begin(plan.step_id, plan.deadline_s)
        self._bus.step_started = plan.step_id
        if following is None:
            # The step before is finished when this one has work for the device, where it can be
            # cut in two: its tokens are on their way, and the next plan comes, while the rest is
            # started.
            finish_before = self._finish_oldest if self._launched else None
            launched = self._executor.launch(plan, finish_before)
        else:
            launched = following.launched
            self._executor.start(launched)
        self._launched.append((plan, launched, idle_s))
        self._launching = None

    def _build_following(self) -> Following | None:
        """Build the next plan's graph while the device ends a step, if the plan only decodes.

        Its first layers are started too: the device has work while the result of the step before is
        read and sent (2 to 4 % of a small model's step), and that is not held back by more.
        """
        try:
            plan = self._checked(self._bus.orders.get(block=False))
        except queue.Empty:
            return None
        if plan.prefill_chunks or plan.draft_chunks:
            # A prefill is computed while it is built, which would take longer than the wait.
            self._held = plan
            return None
        launched = self._executor.prepare(plan)
        is_begun = self._executor.start_first_layers(launched)
        return Following(launched, is_begun)

    def _finish(self) -> None:
        following = self._build_following() if self._builds_ahead else None
        self._finish_oldest()
        if following is not None:
            self._launch(following.launched.plan, following)

    def _finish_oldest(self) -> None:
        plan, launched, idle_s = self._launched.popleft()
        result = self._executor.finish(launched)
        now_s = self._clock.now()
        busy_s = now_s - self._began_at_s
        if plan.prefill_chunks or plan.decodes:
            # Others take no time; patience with the next step must not shrink to theirs.
            self._busy_s = busy_s
        self._began_at_s = self._finished_at_s = now_s
        following = self._launched[0][0] if self._launched else self._launching
        if following is not None:
            self._watchdog.begin(following.step_id, following.deadline_s)
        else:
            self._watchdog.rest()
        is_primary = self._order.rank == 0
        self._bus.say(
            StepFinished(
                epoch=plan.epoch,
                step_id=plan.step_id,
                rank=self._order.rank,
                digest=result.digest,
                tokens=result.tokens if is_primary else [],
                logprobs=result.logprobs if is_primary else [],
                busy_ms=busy_s * 1e3,
                idle_ms=idle_s * 1e3,
                memory_bytes=mx.get_active_memory(),
            )
        )
        self._bus.step_finished = plan.step_id
        if self._first_done is not None:
            done, self._first_done = self._first_done, None
            done()
        if plan.spill is not None:
            self._tier.spill(plan.spill, result.spills)
