"""Main thread of a rank: joins a world, loads a shard and executes step plans. Decides nothing."""

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
from services.rank_worker.kv_cache.stored import arrays
from services.rank_worker.kv_cache.stored.context import TierSettings
from services.rank_worker.kv_cache.stored.tier import StoredTier
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
"""Part of the free memory for KV; activations need the rest."""

RESIDENT_MEMORY_SHARE = 0.5
"""Part of the KV budget for resident blocks where `cache.resident_bytes_max` is 0."""


def serve(
    config: Config,
    order: JoinWorld,
    link: SchedulerLink,
    on_joined: Callable[[], None],
    *,
    device: Device,
    clock: Clock,
    blas: str,
) -> NoReturn:
    """Join the world of `order`, load this rank's shard and execute plans until the process ends.

    Args:
        config: the settings.
        order: the scheduler's order to join; its environment variables are set already.
        link: connection to the scheduler.
        on_joined: called once MLX has joined, so that the files of the environment can be removed.
        device: of this rank.
        clock: measures durations.
        blas: the BLAS library that was preloaded; "" if none was.

    Raises:
        LockstepError: the world cannot be joined, the model cannot be loaded, or a plan is wrong.
    """
    source = find_source(config.model, order.world_size, order.sharding)
    check_drafter(config)
    split = Split(order.sharding, order.rank, order.world_size, order.memory_bytes)
    # Started before this thread is pinned, because new threads inherit the pinning.
    tier = _start_tier(config, order, link, clock)
    world, ranks_on_host = _join(config, order, link, device)
    on_joined()
    proof = FastSynchProof(device)
    link.on_leave = proof.world_left

    def report(stage: Stage, fraction: float) -> None:
        link.send(RankLoading(stage=stage, loaded=fraction))

    with hard_deadline(order.load_deadline_s), failure.name_model_code_line():
        hardware.wire_memory(device)
        memory_bytes = rank_memory_bytes(device, ranks_on_host)
        loaded, drafter = _load(config, source, split, world, report, memory_bytes)
        world.check()
        _compare_ranks(config, world, loaded, drafter)
    canary = _check_sums(order, world, loaded, clock, proof)
    with hard_deadline(order.load_deadline_s), proof.withheld(), failure.name_model_code_line():
        executor = _build_executor(
            config, order, world, loaded, tier, drafter, device, ranks_on_host
        )
        report("warming", 1.0)
        _warm_up(config, executor, loaded, canary, device, ranks_on_host)
        if _has_store(config):
            executor.prepare_spills(config.cache.block_tokens, config.cache.spill_bytes_max)
    budget = _kv_budget_bytes(config, device, ranks_on_host)
    resident_bytes_max = config.cache.resident_bytes_max or int(RESIDENT_MEMORY_SHARE * budget)
    tier.expect(executor.block_payload_bytes, resident_bytes_max)
    link.on_restore = tier.restore
    ready = _ready_message(config, order, loaded, drafter, executor, budget, blas, canary)
    link.send(ready)
    _log.info("rank_ready", rank=order.rank, fingerprint=ready.model_fingerprint, kv_bytes=budget)
    _run_steps(order, executor, link, tier, clock, device, proof.recorder(canary.findings))


def _load(
    config: Config,
    source: ModelSource | None,
    split: Split,
    world: Collectives,
    report: Report,
    memory_bytes: int,
) -> tuple[LoadedModel, LoadedDrafter | None]:
    """Load this rank's shard and the drafter, once both are known to fit in memory."""
    opened = open_model(config.model, source, split, world, report)
    drafter = open_drafter(
        config,
        opened.context_tokens_max,
        activations(opened.model)[1],
        lambda fraction: report("loading", fraction),
    )
    needs = drafter.needs if drafter is not None else None
    check_fits(opened.needs, opened.context_tokens_max, memory_bytes, needs)
    loaded = opened.read(report)
    return loaded, drafter.read() if drafter is not None else None


def _compare_ranks(
    config: Config, world: Collectives, loaded: LoadedModel, drafter: LoadedDrafter | None
) -> None:
    """Compare, over all ranks, the settings that decide which collectives run.

    Raises:
        ConfigError: ranks differ; the message, equal on all ranks, says how.
    """
    facts = {
        "lockstep": code_version.build_id(),
        "model (path, dtype, files, versions of mlx and mlx-lm)": loaded.fingerprint,
        "model.context_tokens_max": str(loaded.context_tokens_max),
        "speculation.method": config.speculation.method,
        "speculation.draft_model": drafter.fingerprint if drafter is not None else "none",
        "rank_worker.kv_bits": str(config.rank_worker.kv_bits),
    }
    rows = world.gather(agreement.encode_row(facts))
    if not agreement.rows_intact(rows):
        _log.warning("settings_not_compared", detail="sums over ranks are wrong, see the canary")
        return
    difference = agreement.find_difference(facts, rows)
    if difference is not None:
        raise ConfigError(difference)


def _kv_budget_bytes(config: Config, device: Device, ranks_on_host: int) -> int:
    """Return the memory that KV may use on this rank, in bytes."""
    return config.rank_worker.kv_bytes_max or _free_kv_bytes(device, ranks_on_host)


def _free_kv_bytes(device: Device, ranks_on_host: int) -> int:
    """Return the part of the memory that is free now that KV may use, in bytes."""
    return int(KV_MEMORY_SHARE * hardware.free_bytes(device, ranks_on_host))


def _row_tokens_max(executor: Executor, bytes_max: int) -> int:
    """Return how many tokens, drafts included, a row of at most `bytes_max` can hold."""
    per_token = executor.kv_bytes_per_token + executor.draft_bytes_per_token
    return max(0, bytes_max - executor.kv_bytes_per_row) // max(1, per_token)


def _check_sums(
    order: JoinWorld, world: Collectives, loaded: LoadedModel, clock: Clock, proof: FastSynchProof
) -> Canary:
    """Check sums before the warm-up, where wrong sums would look like damaged weights."""
    canary = Canary(order, world, clock)
    with hard_deadline(SUMS_DEADLINE_S), proof.withheld(), failure.name_model_code_line():
        canary.check_sums(loaded.model)
    return canary


def _warm_up(
    config: Config,
    executor: Executor,
    loaded: LoadedModel,
    canary: Canary,
    device: Device,
    ranks_on_host: int,
) -> None:
    """Run the warm-up and the prompt of the canary."""
    speculates = config.speculation.method != "off"
    warm_up(executor, loaded.context_tokens_max, speculates=speculates)
    # rank_worker.kv_bytes_max may exceed the free memory.
    row_bytes = min(
        _kv_budget_bytes(config, device, ranks_on_host), _free_kv_bytes(device, ranks_on_host)
    )
    row_tokens = _row_tokens_max(executor, row_bytes)
    on_cpu = device.kind == "cpu"
    canary.check_prompt(executor, loaded.context_tokens_max, row_tokens, on_cpu=on_cpu)


def _run_steps(
    order: JoinWorld,
    executor: Executor,
    link: SchedulerLink,
    tier: StoredTier,
    clock: Clock,
    device: Device,
    on_first_step: Callable[[], None] | None,
) -> NoReturn:
    # All objects so far live as long as the process; later garbage collections skip them.
    gc.collect()
    gc.freeze()
    watchdog = Watchdog(clock)
    watchdog.start()
    on_cpu = device.kind == "cpu"
    StepLoop(
        order, executor, link, tier, watchdog, clock, on_cpu=on_cpu, on_first_step=on_first_step
    ).run()


def _join(
    config: Config, order: JoinWorld, link: SchedulerLink, device: Device
) -> tuple[Collectives, int]:
    """Pin this process to its cores and join the world, which waits for the other ranks.

    Returns:
        The world, and the number of its ranks on this host (1 if the hosts are unknown).
    """
    hostfile = cores.hostfile(order) if order.backend == "ring" else ""
    place, count = cores.place_on_host(hostfile, order.rank)
    has_few_cores = available_cores() < count * ring_sockets.POLLING_CORES_PER_RANK
    cores.pin(config.rank_worker.pin_cores, on_cpu=device.kind == "cpu", place=place, count=count)
    link.send(RankLoading(stage="joining", loaded=0.0))
    rendezvous.wait_for_ranks(order)
    # MLX holds the GIL while it waits for the other ranks.
    with hard_deadline(order.init_deadline_s), lifeline.killed_with_parent():
        world = collectives.init(order.backend, order.rank, order.world_size)
        if hostfile and has_few_cores and sys.platform == "linux":
            ring_sockets.make_blocking(hostfile)
    _log.info("world_joined", epoch=order.epoch, rank=order.rank, world_size=order.world_size)
    return world, count


def _start_tier(config: Config, order: JoinWorld, link: SchedulerLink, clock: Clock) -> StoredTier:
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


def _build_executor(
    config: Config,
    order: JoinWorld,
    world: Collectives,
    loaded: LoadedModel,
    tier: StoredTier,
    drafter: LoadedDrafter | None,
    device: Device,
    ranks_on_host: int,
) -> Executor:
    return Executor(
        loaded.model,
        rank=order.rank,
        world_size=order.world_size,
        synchronization=order.synchronization,
        receipt_logits=order.receipt_logits,
        sum_ids=world.sum_ids if order.world_size > 1 else None,
        forward_cost_tokens=forward_cost_of(order.backend, on_cpu=device.kind == "cpu"),
        kv_bits=config.rank_worker.kv_bits,
        profile=execution_profile(
            device, order.backend, hardware.free_bytes(device, ranks_on_host)
        ),
        take_restored=tier.take,
        drafter=drafter,
        traits=loaded.traits,
    )


def _ready_message(
    config: Config,
    order: JoinWorld,
    loaded: LoadedModel,
    drafter: LoadedDrafter | None,
    executor: Executor,
    budget: int,
    blas: str,
    canary: Canary,
) -> RankReady:
    fingerprints = (loaded.fingerprint, *([drafter.fingerprint] if drafter is not None else []))
    return RankReady(
        rank=order.rank,
        model_fingerprint="+".join(fingerprints),
        kv_bytes_per_token=executor.kv_bytes_per_token,
        kv_bytes_per_row=executor.kv_bytes_per_row,
        kv_budget_bytes=budget,
        context_tokens_max=loaded.context_tokens_max,
        vocab_size=executor.vocab_size,
        can_roll_back=executor.can_roll_back,
        needs_checkpoints=executor.needs_checkpoints,
        kv_layout=executor.kv_layout if config.cache.enabled else "",
        draft_method=drafter.method if drafter is not None else config.speculation.method,
        draft_bytes_per_token=executor.draft_bytes_per_token,
        shard_bytes=loaded.shard_bytes,
        canary=canary.findings,
        blas=blas,
    )
