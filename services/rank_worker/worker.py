"""The main thread of a rank: join, load, then execute plans in order. It decides nothing."""

import gc
import sys
from collections.abc import Callable
from typing import NoReturn

from services.rank_worker import collectives, failure
from services.rank_worker.batch.decode_groups import forward_cost_of
from services.rank_worker.canary.canary import SUMS_DEADLINE_S, Canary, activations
from services.rank_worker.collectives import Collectives
from services.rank_worker.device import cores, hardware, ring_sockets
from services.rank_worker.device.description import Device
from services.rank_worker.device.execution_profile import execution_profile
from services.rank_worker.device.fast_synch_proof import FastSynchProof
from services.rank_worker.execution.executor import Executor
from services.rank_worker.execution.step_loop import StepLoop
from services.rank_worker.execution.warmup import warm_up
from services.rank_worker.joining import agreement, code_version, rendezvous
from services.rank_worker.kv_cache.stored import StoredTier, TierSettings, arrays
from services.rank_worker.model.loading.loader import LoadedModel, Report, Stage, open_model
from services.rank_worker.model.loading.memory_fit import check_fits, rank_memory_bytes
from services.rank_worker.model.loading.source import ModelSource, find_source
from services.rank_worker.scheduler_link import SchedulerLink
from services.rank_worker.speculation.load import check_drafter, open_drafter
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from services.rank_worker.watchdog import Watchdog, hard_deadline
from shared.clock import Clock
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.log import Log
from shared.messages import JoinWorld, RankLoading, RankReady
from shared.model.sharding.shares import Split
from shared.os import lifeline
from shared.os.cpu_cores import available_cores

_log = Log("rank_worker")

KV_MEMORY_SHARE = 0.6
"""Part of the free memory that KV rows may take; activations need the rest."""

RESIDENT_SHARE = 0.5
"""Part of that which resident blocks may take where `cache.resident_bytes_max` is 0."""


def serve(
    config: Config,
    order: JoinWorld,
    link: SchedulerLink,
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
    source = find_source(config.model, order.world_size, order.sharding)
    check_drafter(config)
    split = Split(order.sharding, order.rank, order.world_size, order.memory_bytes)
    # Before the model is loaded, so that the store is there for the first request; and before this
    # thread is pinned, so that the tier's are not.
    tier = _stored_tier(config, order, link, clock)
    world, ranks_here = _join(config, order, link, here)
    joined()
    proof = FastSynchProof(here)
    link.on_leave = proof.world_left

    def tell(stage: Stage, part: float) -> None:
        link.send(RankLoading(stage=stage, loaded=part))

    with hard_deadline(order.load_deadline_s), failure.name_model_code_line():
        hardware.wire_memory(here)
        memory_bytes = rank_memory_bytes(here, ranks_here)
        loaded, draft = _load(config, source, split, world, tell, memory_bytes)
        world.check()
        _agree(config, world, loaded, draft)
    canary = _canary(order, world, loaded, clock, proof)
    on_cpu = here.kind == "cpu"
    with hard_deadline(order.load_deadline_s), proof.withheld(), failure.name_model_code_line():
        executor = _executor(config, order, world, loaded, tier, draft, here, ranks_here)
        tell("warming", 1.0)
        speculates = config.speculation.method != "off"
        warm_up(executor, loaded.context_tokens_max, speculates=speculates)
        # What an operator allows may be more than there is.
        least = min(_kv_budget(config, here, ranks_here), _kv_share(here, ranks_here))
        room = _row_tokens(executor, least)
        canary.check_prompt(executor, loaded.context_tokens_max, room, on_cpu=on_cpu)
        if _has_store(config):
            executor.prepare_spills(config.cache.block_tokens, config.cache.spill_bytes_max)
    budget = _kv_budget(config, here, ranks_here)
    # The scheduler has no room for more than that to become resident.
    staged_bytes_max = config.cache.resident_bytes_max or int(RESIDENT_SHARE * budget)
    tier.expect(executor.block_payload_bytes, staged_bytes_max)
    link.on_restore = tier.restore
    ready = _ready(config, order, loaded, draft, executor, budget, blas, canary)
    link.send(ready)
    _log.info("rank_ready", rank=order.rank, fingerprint=ready.model_fingerprint, kv_bytes=budget)
    _execute(order, executor, link, tier, clock, here, proof.recorder(canary.findings))


def _load(
    config: Config,
    source: ModelSource | None,
    split: Split,
    world: Collectives,
    tell: Report,
    memory_bytes: int,
) -> tuple[LoadedModel, LoadedDrafter | None]:
    """Load this rank's shard and what drafts for it; nothing is read before both fit together."""
    opened = open_model(config.model, source, split, world, tell)
    draft = open_drafter(
        config,
        opened.context_tokens_max,
        activations(opened.model)[1],
        lambda part: tell("loading", part),
    )
    needs = draft.needs if draft is not None else None
    check_fits(opened.needs, opened.context_tokens_max, memory_bytes, needs)
    loaded = opened.read(tell)
    return loaded, draft.read() if draft is not None else None


def _agree(
    config: Config, world: Collectives, loaded: LoadedModel, draft: LoadedDrafter | None
) -> None:
    """Compare what decides which collectives follow; a collective itself, of one shape whatever.

    Raises:
        ConfigError: ranks are set up differently; all of them say how.
    """
    facts = agreement.load_facts(
        code=code_version.build_id(),
        fingerprint=loaded.fingerprint,
        context_tokens_max=loaded.context_tokens_max,
        method=config.speculation.method,
        draft_fingerprint=draft.fingerprint if draft is not None else "",
        kv_bits=config.rank_worker.kv_bits,
    )
    rows = world.gather(agreement.row(facts))
    if not agreement.is_whole(rows):
        _log.warning("settings_not_compared", detail="sums over ranks are wrong, see the canary")
        return
    differs = agreement.difference(facts, rows)
    if differs is not None:
        raise ConfigError(differs)


def _kv_budget(config: Config, here: Device, ranks_here: int) -> int:
    """Return the memory for KV that this rank may use, in bytes."""
    return config.rank_worker.kv_bytes_max or _kv_share(here, ranks_here)


def _kv_share(here: Device, ranks_here: int) -> int:
    """Return what KV may take of the memory that is free now, in bytes."""
    return int(KV_MEMORY_SHARE * hardware.free_bytes(here, ranks_here))


def _row_tokens(executor: Executor, bytes_max: int) -> int:
    """Return how many tokens a row may have, drafts included, that takes no more than that."""
    per_token = executor.kv_bytes_per_token + executor.draft_bytes_per_token
    return max(0, bytes_max - executor.kv_bytes_per_row) // max(1, per_token)


def _canary(
    order: JoinWorld, world: Collectives, loaded: LoadedModel, clock: Clock, proof: FastSynchProof
) -> Canary:
    """Check sums ahead of the warm-up, which would take wrong ones for damaged weights."""
    canary = Canary(order, world, clock)
    with hard_deadline(SUMS_DEADLINE_S), proof.withheld(), failure.name_model_code_line():
        canary.check_sums(loaded.model)
    return canary


def _execute(
    order: JoinWorld,
    executor: Executor,
    link: SchedulerLink,
    tier: StoredTier,
    clock: Clock,
    here: Device,
    proof: Callable[[], None] | None,
) -> NoReturn:
    # What is loaded lives as long as the process; later collections need not look at it again.
    gc.collect()
    gc.freeze()
    watchdog = Watchdog(clock)
    watchdog.start()
    on_cpu = here.kind == "cpu"
    StepLoop(order, executor, link, tier, watchdog, clock, on_cpu=on_cpu, on_first_step=proof).run()


def _join(
    config: Config, order: JoinWorld, link: SchedulerLink, here: Device
) -> tuple[Collectives, int]:
    """Take this process' cores and join the world, which waits for its other ranks.

    Returns:
        The world, and how many of its ranks are on this host (1 where nobody says where they are).
    """
    hostfile = cores.hostfile(order) if order.backend == "ring" else ""
    place, count = cores.place_on_host(hostfile, order.rank)
    few_cores = available_cores() < count * ring_sockets.CORES_PER_RANK_ENOUGH
    cores.pin(config.rank_worker.pin_cores, on_cpu=here.kind == "cpu", place=place, count=count)
    link.send(RankLoading(stage="joining", loaded=0.0))
    rendezvous.meet(order)
    # MLX holds the GIL while it waits for its peers.
    with hard_deadline(order.init_deadline_s), lifeline.killed_with_parent():
        world = collectives.init(order.backend, order.rank, order.world_size)
        if hostfile and few_cores and sys.platform == "linux":
            ring_sockets.wait_in_kernel(hostfile)
    _log.info("world_joined", epoch=order.epoch, rank=order.rank, world_size=order.world_size)
    return world, count


def _stored_tier(config: Config, order: JoinWorld, link: SchedulerLink, clock: Clock) -> StoredTier:
    settings = TierSettings(
        store_address=config.store_address,
        epoch=order.epoch,
        rank=order.rank,
        world_size=order.world_size,
        spill_bytes_max=config.cache.spill_bytes_max,
        keys_dir=config.keys_dir,
    )
    tier = StoredTier(settings, link.send, arrays.allocate, is_on=_has_store(config), clock=clock)
    tier.start()
    return tier


def _has_store(config: Config) -> bool:
    return config.cache.enabled and config.cache.ssd


def _executor(
    config: Config,
    order: JoinWorld,
    world: Collectives,
    loaded: LoadedModel,
    tier: StoredTier,
    draft: LoadedDrafter | None,
    here: Device,
    ranks_here: int,
) -> Executor:
    return Executor(
        loaded.model,
        rank=order.rank,
        world_size=order.world_size,
        synchronization=order.synchronization,
        receipt_logits=order.receipt_logits,
        sum_ids=world.sum_ids if order.world_size > 1 else None,
        forward_cost_tokens=forward_cost_of(order.backend, on_cpu=here.kind == "cpu"),
        kv_bits=config.rank_worker.kv_bits,
        profile=execution_profile(here, order.backend, hardware.free_bytes(here, ranks_here)),
        take_restored=tier.take,
        drafter=draft,
        traits=loaded.traits,
    )


def _ready(
    config: Config,
    order: JoinWorld,
    loaded: LoadedModel,
    draft: LoadedDrafter | None,
    executor: Executor,
    budget: int,
    blas: str,
    canary: Canary,
) -> RankReady:
    both = (loaded.fingerprint, *([draft.fingerprint] if draft is not None else []))
    return RankReady(
        rank=order.rank,
        model_fingerprint="+".join(both),
        kv_bytes_per_token=executor.kv_bytes_per_token,
        kv_bytes_per_row=executor.kv_bytes_per_row,
        kv_budget_bytes=budget,
        context_tokens_max=loaded.context_tokens_max,
        vocab_size=executor.vocab_size,
        can_roll_back=executor.can_roll_back,
        needs_checkpoints=executor.needs_checkpoints,
        kv_layout=executor.kv_layout if config.cache.enabled else "",
        draft_method=draft.method if draft is not None else config.speculation.method,
        draft_bytes_per_token=executor.draft_bytes_per_token,
        shard_bytes=loaded.shard_bytes,
        canary=canary.findings,
        blas=blas,
    )
