"""The main thread of a rank: join, load, then execute plans in order. It decides nothing."""

import dataclasses
import gc
import sys
from collections.abc import Callable
from typing import NoReturn

from services.rank_worker import (
    collectives,
    cores,
    fast_synch,
    hardware,
    loading,
    meeting,
    ring_sockets,
)
from services.rank_worker.bus import Bus
from services.rank_worker.canary import SUMS_DEADLINE_S, Canary
from services.rank_worker.collectives import Collectives
from services.rank_worker.device import Device
from services.rank_worker.drafting.draft import Draft
from services.rank_worker.drafting.load import check_draft, load_draft
from services.rank_worker.executor import Executor
from services.rank_worker.loading import LoadedModel
from services.rank_worker.sharding import Split
from services.rank_worker.speculation.groups import forward_tokens_of
from services.rank_worker.steps import Steps
from services.rank_worker.stored import StoredTier, TierSettings, arrays
from services.rank_worker.warmup import warm_up
from services.rank_worker.watchdog import Watchdog, hard_deadline
from shared import lifeline
from shared.clock import Clock
from shared.log import Log
from shared.messages import JoinWorld, RankLoading, RankReady
from shared.settings import Config

_log = Log("rank_worker")

KV_SHARE = 0.6
"""Part of the free memory that KV rows may take; activations need the rest."""

RESIDENT_SHARE = 0.5
"""Part of that which resident blocks may take where `cache.resident_bytes_max` is 0."""


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
    source = loading.find(config.model, order.world_size, order.sharding)
    check_draft(config)
    split = Split(order.sharding, order.rank, order.world_size, order.memory_bytes)
    # Before the model is loaded, so that the store is there for the first request; and before this
    # thread is pinned, so that the tier's are not.
    tier = _stored_tier(config, order, bus, clock)
    world, ranks_here = _join(config, order, bus, here)
    joined()
    with hard_deadline(order.load_deadline_s):
        hardware.wire_memory(here)
        loaded = loading.load(
            config.model,
            source,
            split,
            world,
            lambda stage, part: bus.say(RankLoading(stage=stage, loaded=part)),
            memory_bytes=loading.memory_of(here, ranks_here),
        )
        world.check()
    canary = _canary(order, world, loaded, clock, here)
    with hard_deadline(order.load_deadline_s):
        draft = load_draft(
            config, loaded, lambda part: bus.say(RankLoading(stage="loading", loaded=part))
        )
        executor = _executor(config, order, world, loaded, tier, draft, on_cpu=here.kind == "cpu")
        bus.say(RankLoading(stage="warming", loaded=1.0))
        speculates = config.speculation.method != "off"
        warm_up(executor, loaded.context_tokens_max, speculates=speculates)
        canary.check_prompt(executor, loaded.context_tokens_max, on_cpu=here.kind == "cpu")
    free_bytes = hardware.free_bytes(here, ranks_here)
    budget = config.rank_worker.kv_bytes_max or int(KV_SHARE * free_bytes)
    # The scheduler has no room for more than that to become resident.
    staged_bytes_max = config.cache.resident_bytes_max or int(RESIDENT_SHARE * budget)
    tier.expect(executor.block_payload_bytes, staged_bytes_max)
    bus.restore = tier.restore
    if draft is not None:
        loaded = dataclasses.replace(
            loaded, fingerprint=f"{loaded.fingerprint}+{draft.fingerprint}"
        )
    bus.say(_ready(config, order, loaded, executor, budget, blas, canary))
    _log.info("rank_ready", rank=order.rank, fingerprint=loaded.fingerprint, kv_bytes=budget)
    _execute(order, executor, bus, tier, clock, here, canary)


def _canary(
    order: JoinWorld, world: Collectives, loaded: LoadedModel, clock: Clock, here: Device
) -> Canary:
    """Check sums ahead of the warm-up, which would take wrong ones for damaged weights."""
    canary = Canary(order, world, clock)
    with hard_deadline(SUMS_DEADLINE_S), fast_synch.trusted(here):
        canary.check_sums(loaded.model)
    return canary


def _execute(
    order: JoinWorld,
    executor: Executor,
    bus: Bus,
    tier: StoredTier,
    clock: Clock,
    here: Device,
    canary: Canary,
) -> NoReturn:
    # What is loaded lives as long as the process; later collections need not look at it again.
    gc.collect()
    gc.freeze()
    watchdog = Watchdog(clock)
    watchdog.start()
    on_cpu = here.kind == "cpu"
    proof = fast_synch.proof(here, canary.findings)
    Steps(order, executor, bus, tier, watchdog, clock, on_cpu=on_cpu, first_done=proof).run()


def _join(config: Config, order: JoinWorld, bus: Bus, here: Device) -> tuple[Collectives, int]:
    """Take this process' cores and join the world, which waits for its other ranks.

    Returns:
        The world, and how many of its ranks are on this host (1 where nobody says where they are).
    """
    hostfile = cores.hostfile(order) if order.backend == "ring" else ""
    place, count = cores.place_on_host(hostfile, order.rank)
    few_cores = cores.available() < count * ring_sockets.CORES_PER_RANK_ENOUGH
    cores.pin(config.rank_worker.pin_cores, on_cpu=here.kind == "cpu", place=place, count=count)
    bus.say(RankLoading(stage="joining", loaded=0.0))
    meeting.meet(order)
    # MLX holds the GIL while it waits for its peers.
    with hard_deadline(order.init_deadline_s), lifeline.without_threads():
        world = collectives.init(order.backend, order.rank, order.world_size)
        if hostfile and few_cores and sys.platform == "linux":
            ring_sockets.wait_in_kernel(hostfile)
    _log.info("world_joined", epoch=order.epoch, rank=order.rank, world_size=order.world_size)
    return world, count


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
    draft: Draft | None,
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
        draft=draft,
    )


def _ready(
    config: Config,
    order: JoinWorld,
    loaded: LoadedModel,
    executor: Executor,
    budget: int,
    blas: str,
    canary: Canary,
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
        draft_bytes_per_token=executor.draft_bytes_per_token,
        shard_bytes=loaded.shard_bytes,
        canary=canary.findings,
        blas=blas,
    )
