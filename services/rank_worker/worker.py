"""The main thread of a rank: join, load, then execute plans in order. It decides nothing."""

import gc
import queue
import sys
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import mlx.core as mx

from services.rank_worker import collectives, cores, hardware, loading, ring_sockets
from services.rank_worker.bus import Bus
from services.rank_worker.collectives import Collectives
from services.rank_worker.device import Device
from services.rank_worker.executor import Executor, Launched
from services.rank_worker.loading import LoadedModel
from services.rank_worker.speculation.groups import forward_tokens_of
from services.rank_worker.stored import StoredTier, TierSettings, arrays
from services.rank_worker.warmup import warm_up
from services.rank_worker.watchdog import Watchdog, hard_deadline
from shared import lifeline, limits
from shared.clock import Clock
from shared.errors import InvariantBroken
from shared.log import Log
from shared.messages import JoinWorld, RankLoading, RankReady, StepFinished, StepPlan
from shared.settings import Config

_log = Log("rank_worker")

KV_SHARE = 0.6
"""Part of the free memory that KV rows may take; activations need the rest."""

RESIDENT_SHARE = 0.5
"""Part of that which resident blocks may take where `cache.resident_bytes_max` is 0."""

PATIENCE_S = 0.002
"""Longest wait for a plan to launch ahead; an answer takes the scheduler 0.1 to 1 ms."""

PATIENCE_SHARE = 0.5
"""And no longer than this part of the last step, so that a finished step is not kept waiting."""


def serve(
    config: Config,
    order: JoinWorld,
    bus: Bus,
    joined: Callable[[], None],
    *,
    here: Device,
    clock: Clock,
    blas: str,
) -> NoReturn:
    """Join the world of `order`, load this rank's shard and execute plans until the process ends.

    The environment of `order` is set already; `joined` is called when MLX has read it.

    Raises:
        LockstepError: the world, the model or a plan is not what it must be.
    """
    source = loading.find(config.model, order.world_size)
    # Before the model is loaded, so that the store is there for the first request; and before this
    # thread is pinned, so that the tier's are not.
    tier = _stored_tier(config, order, bus, clock)
    hostfile = cores.hostfile(order) if order.backend == "ring" else ""
    place, count = cores.place_on_host(hostfile, order.rank)
    few_cores = cores.available() < count * ring_sockets.CORES_PER_RANK_ENOUGH
    cores.pin(config.rank_worker.pin_cores, on_cpu=here.kind == "cpu", place=place, count=count)
    bus.say(RankLoading(stage="joining", loaded=0.0))
    # MLX holds the GIL while it waits for its peers.
    with hard_deadline(order.init_deadline_s), lifeline.without_threads():
        world = collectives.init(order.backend, order.rank, order.world_size)
        if hostfile and few_cores and sys.platform == "linux":
            ring_sockets.wait_in_kernel(hostfile)
    joined()
    _log.info("world_joined", epoch=order.epoch, rank=order.rank, world_size=order.world_size)
    with hard_deadline(order.load_deadline_s):
        hardware.wire_memory(here)
        loaded = loading.load(
            config.model,
            source,
            world,
            lambda stage, part: bus.say(RankLoading(stage=stage, loaded=part)),
        )
        world.check()
        executor = _executor(config, order, world, loaded, tier, on_cpu=here.kind == "cpu")
        bus.say(RankLoading(stage="warming", loaded=1.0))
        speculates = config.speculation.method != "off"
        warm_up(executor, loaded.context_tokens_max, speculates=speculates)
    budget = config.rank_worker.kv_bytes_max or int(KV_SHARE * hardware.free_bytes(here, count))
    # The scheduler has no room for more than that to become resident.
    staged_bytes_max = config.cache.resident_bytes_max or int(RESIDENT_SHARE * budget)
    tier.expect(executor.block_payload_bytes, staged_bytes_max)
    bus.restore = tier.restore
    bus.say(_ready(config, order, loaded, executor, budget, blas))
    _log.info("rank_ready", rank=order.rank, fingerprint=loaded.fingerprint, kv_bytes=budget)
    # What is loaded lives as long as the process; later collections need not look at it again.
    gc.collect()
    gc.freeze()
    watchdog = Watchdog(clock)
    watchdog.start()
    Steps(order, executor, bus, tier, watchdog, clock, on_cpu=here.kind == "cpu").run()


def _stored_tier(config: Config, order: JoinWorld, bus: Bus, clock: Clock) -> StoredTier:
    settings = TierSettings(
        store_address=config.store_address,
        epoch=order.epoch,
        rank=order.rank,
        world_size=order.world_size,
        spill_bytes_max=config.cache.spill_bytes_max,
        keys_dir=config.keys_dir,
    )
    is_on = config.cache.enabled and config.cache.ssd
    tier = StoredTier(settings, bus.say, arrays.allocate, is_on=is_on, clock=clock)
    tier.start()
    return tier


def _executor(
    config: Config,
    order: JoinWorld,
    world: Collectives,
    loaded: LoadedModel,
    tier: StoredTier,
    *,
    on_cpu: bool,
) -> Executor:
    return Executor(
        loaded.model,
        rank=order.rank,
        world_size=order.world_size,
        synchronization=order.synchronization,
        receipt_logits=order.receipt_logits,
        share_ids=world.sum_ids if order.world_size > 1 else None,
        forward_tokens=forward_tokens_of(order.backend, on_cpu=on_cpu),
        kv_bits=config.rank_worker.kv_bits,
        take_restored=tier.take,
    )


def _ready(
    config: Config,
    order: JoinWorld,
    loaded: LoadedModel,
    executor: Executor,
    budget: int,
    blas: str,
) -> RankReady:
    return RankReady(
        rank=order.rank,
        model_fingerprint=loaded.fingerprint,
        kv_bytes_per_token=executor.kv_bytes_per_token,
        kv_bytes_per_row=executor.kv_bytes_per_row,
        kv_budget_bytes=budget,
        context_tokens_max=loaded.context_tokens_max,
        vocab_size=executor.vocab_size,
        can_roll_back=executor.can_roll_back,
        needs_checkpoints=executor.needs_checkpoints,
        kv_layout=executor.kv_layout if config.cache.enabled else "",
        blas=blas,
    )


class Steps:
    """Executes plans in order: two on the device, or one and the graph of the next on a CPU."""

    def __init__(
        self,
        order: JoinWorld,
        executor: Executor,
        bus: Bus,
        tier: StoredTier,
        watchdog: Watchdog,
        clock: Clock,
        *,
        on_cpu: bool,
    ) -> None:
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
            if self._launched and _waits(self._held):
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
        if _waits(plan):
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

    def _launch(self, plan: StepPlan, prepared: Launched | None = None) -> None:
        now_s = self._clock.now()
        idle_s = 0.0
        if not self._launched:
            idle_s = now_s - (self._finished_at_s or now_s)
            self._began_at_s = now_s
            self._watchdog.begin(plan.step_id, plan.deadline_s)
        self._bus.step_started = plan.step_id
        launched = self._executor.prepare(plan) if prepared is None else prepared
        self._executor.start(launched)
        self._launched.append((plan, launched, idle_s))

    def _build_following(self) -> tuple[StepPlan, Launched] | None:
        """Build the next plan's graph while the device ends a step, if the plan only decodes."""
        try:
            plan = self._checked(self._bus.orders.get(block=False))
        except queue.Empty:
            return None
        if plan.prefill_chunks:
            # A prefill is computed while it is built, which would take longer than the wait.
            self._held = plan
            return None
        return plan, self._executor.prepare(plan)

    def _finish(self) -> None:
        following = self._build_following() if self._builds_ahead else None
        self._finish_oldest()
        if following is not None:
            self._launch(*following)

    def _finish_oldest(self) -> None:
        plan, launched, idle_s = self._launched.popleft()
        result = self._executor.finish(launched)
        now_s = self._clock.now()
        busy_s = now_s - self._began_at_s
        if plan.prefill_chunks or plan.decodes:
            # Others take no time; patience with the next step must not shrink to theirs.
            self._busy_s = busy_s
        self._began_at_s = self._finished_at_s = now_s
        if self._launched:
            following = self._launched[0][0]
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
        if plan.spill is not None:
            self._tier.spill(plan.spill, result.spills)


def _waits(plan: StepPlan) -> bool:
    """Tell whether launching a plan waits for all steps before it: their results go first."""
    return bool(plan.keep_blocks or plan.keep_checkpoints)
