"""Main thread of a rank: joins a world, loads a shard and executes step plans. Decides nothing."""

import dataclasses
import gc
import sys
from collections.abc import Callable
from typing import NoReturn

from services.rank_worker.batch.decode_groups import forward_cost_of
from services.rank_worker.canary.canary import SUMS_DEADLINE_S, Canary, activations
from services.rank_worker.device import cores, hardware, ring_sockets
from services.rank_worker.device.description import Device
from services.rank_worker.device.execution_profile import execution_profile
from services.rank_worker.device.fast_synch_proof import FastSynchProof
from services.rank_worker.execution.executor import Executor
from services.rank_worker.execution.measurements import StepMeasurements
from services.rank_worker.execution.prefill_time import NOT_TIMED, PrefillTime, time_prefill
from services.rank_worker.execution.step_loop import StepLoop
from services.rank_worker.execution.warmup import warm_up
from services.rank_worker.joining import agreement, code_version, rendezvous
from services.rank_worker.joining.start_deadlines import StartDeadlines
from services.rank_worker.kv_cache.stored import arrays
from services.rank_worker.kv_cache.stored.context import TierSettings
from services.rank_worker.kv_cache.stored.tier import StoredTier
from services.rank_worker.model.expert_counter import ExpertCounter, open_expert_counter
from services.rank_worker.model.fast_path.opening import fast_path_settings
from services.rank_worker.model.loading.loader import LoadedModel, Stage, open_model
from services.rank_worker.model.loading.memory_fit import check_fits, rank_memory_bytes
from services.rank_worker.model.loading.source import ModelSource, find_source
from services.rank_worker.peers import collectives, failure
from services.rank_worker.peers.collectives import Collectives
from services.rank_worker.peers.watchdog import Watchdog
from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
from services.rank_worker.scheduler_link import SchedulerLink
from services.rank_worker.speculation.load import check_drafter, open_drafter
from services.rank_worker.speculation.loaded_drafter import LoadedDrafter
from shared.clock import Clock
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.log import Log
from shared.messages import GrammarCompiled, JoinWorld, RankLoading, RankReady
from shared.model.sharding.shares import Split
from shared.os import lifeline
from shared.os.cpu_cores import available_cores

_log = Log("rank_worker")

KV_MEMORY_SHARE = 0.6
"""Part of the free memory for KV; activations need the rest."""

RESIDENT_MEMORY_SHARE = 0.5
"""Part of the KV budget for resident blocks where `cache.resident_bytes_max` is 0."""

INIT_MIN_S = 1.0
"""Least time for MLX's init, however late the rendezvous ended."""


@dataclasses.dataclass(slots=True)
class Worker:
    """One rank, from the scheduler's order to join a world until the process ends."""

    config: Config
    order: JoinWorld
    """The scheduler's order to join; its environment variables are set already."""
    link: SchedulerLink
    """Connection to the scheduler."""
    device: Device
    """Of this rank."""
    clock: Clock
    """Measures durations."""
    blas: str
    """The BLAS library that was preloaded; "" if none was."""
    ranks_on_host: int = 1
    """Number of ranks of this world on this host; known once the world is joined, 1 if the hosts
    are unknown."""
    expert_counter: ExpertCounter | None = None
    """Counts assignments to experts; None: the model has none, or they are not counted."""
    prefill_time: PrefillTime = NOT_TIMED
    """Measured once the rank is warm; on a CPU it is not."""

    def serve(self, on_joined: Callable[[], None]) -> NoReturn:
        """Join the world, load this rank's shard and execute plans until the process ends.

        Args:
            on_joined: called once MLX has joined, so that the files of the environment can be
                removed.

        Raises:
            LockstepError: the world cannot be joined, the model cannot be loaded, or a plan is
                wrong.
        """
        config, order, link = self.config, self.order, self.link
        deadlines = StartDeadlines(order, link)
        source = find_source(config.model, order.world_size, order.sharding)
        check_drafter(config)
        # Started before this thread is pinned, because new threads inherit the pinning.
        tier = self._start_tier()
        world = self._join()
        on_joined()
        proof = FastSynchProof(self.device)
        link.on_leave = proof.world_left
        with deadlines.loading(), failure.name_model_code_line():
            hardware.wire_memory(self.device)
            loaded, drafter, grammars = self._load(source, world)
            world.check()
            self._compare_ranks(world, loaded, drafter, grammars)
        # Sums are checked before the warm-up, where wrong sums would look like damaged weights.
        canary = Canary(order, world, self.clock)
        sums_deadline = deadlines.within(
            "The known sums over all ranks",
            SUMS_DEADLINE_S,
            "check the links with `lockstep doctor`",
        )
        with sums_deadline, proof.withheld(), failure.name_model_code_line():
            canary.check_sums(loaded.model, loaded.vocabulary)
        with deadlines.loading(), proof.withheld(), failure.name_model_code_line():
            executor = self._build_executor(world, loaded, tier, drafter, grammars)
            self._report("warming", 1.0)
            self._warm_up(executor, loaded, canary, world)
            grammars.wait_until_ready()
            if self._has_store:
                cache = config.cache
                executor.blocks.prepare_spills(cache.block_tokens, cache.spill_bytes_max)
        budget = self._kv_budget_bytes()
        resident_bytes_max = config.cache.resident_bytes_max or int(RESIDENT_MEMORY_SHARE * budget)
        tier.expect(executor.store.block_bytes, resident_bytes_max)
        link.on_restore = tier.restore
        ready = self._ready_message(loaded, drafter, executor, canary, budget)
        link.send(ready)
        _log.info("rank_ready", fingerprint=ready.model_fingerprint, kv_bytes=budget)
        self._run_steps(executor, tier, proof.recorder(canary.findings))

    def _start_tier(self) -> StoredTier:
        settings = TierSettings(
            store_address=self.config.store_address,
            epoch=self.order.epoch,
            rank=self.order.rank,
            world_size=self.order.world_size,
            spill_bytes_max=self.config.cache.spill_bytes_max,
            keys_dir=self.config.keys_dir,
        )
        tier = StoredTier(
            settings, self.link.send, arrays.allocate, is_on=self._has_store, clock=self.clock
        )
        tier.start()
        return tier

    @property
    def _has_store(self) -> bool:
        return self.config.cache.enabled and self.config.cache.ssd

    @property
    def _on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    def _join(self) -> Collectives:
        """Pin this process to its cores and join the world, which waits for the other ranks."""
        order = self.order
        hostfile = cores.hostfile(order) if order.backend == "ring" else ""
        place, count = cores.place_on_host(hostfile, order.rank)
        has_few_cores = available_cores() < count * ring_sockets.POLLING_CORES_PER_RANK
        pin_cores = self.config.rank_worker.pin_cores
        cores.pin(pin_cores, on_cpu=self._on_cpu, place=place, count=count)
        self._report("joining", 0.0)
        began_s = self.clock.now()
        self.link.awaits_report = True
        rendezvous.wait_for_ranks(order)
        left_s = max(INIT_MIN_S, order.init_deadline_s - (self.clock.now() - began_s))
        remedy = "check the links with `lockstep doctor`, or raise scheduler.init_deadline_s"
        if order.backend != "off":
            # Said now: MLX's init holds the GIL, so later this process can only write its stacks.
            _log.info(
                "mlx_init_begins",
                backend=order.backend,
                detail=f"It waits for the other ranks. After {left_s:.0f} s this process writes "
                f"its stacks and ends: then {remedy}.",
            )
            self._report("init", 0.0)
            self.link.wait_until_sent()
        in_time = StartDeadlines(order, self.link).within(
            f"MLX's init of {order.backend}", left_s, remedy
        )
        with in_time, lifeline.killed_with_parent():
            world = collectives.init(order.backend, order.rank, order.world_size)
            if hostfile and has_few_cores and sys.platform == "linux":
                ring_sockets.make_blocking(hostfile)
        self.link.awaits_report = False
        self._report("loading", 0.0)
        _log.info("world_joined", world_size=order.world_size)
        self.ranks_on_host = count
        return world

    def _report(self, stage: Stage, fraction: float) -> None:
        """Tell the scheduler which part of loading is done: a stage and its fraction, 0 to 1."""
        self.link.send(RankLoading(stage=stage, loaded=fraction))

    def _report_grammar(self, step_id: int, sequence_id: int, failure: str) -> None:
        """Tell the scheduler that a sequence's grammar is compiled, or why it cannot be."""
        self.link.send(
            GrammarCompiled(
                epoch=self.order.epoch,
                rank=self.order.rank,
                step_id=step_id,
                sequence_id=sequence_id,
                failure=failure[:4_000],
            )
        )

    def _load(
        self, source: ModelSource | None, world: Collectives
    ) -> tuple[LoadedModel, LoadedDrafter | None, GrammarCompiler]:
        """Load this rank's shard and the drafter, once both are known to fit in memory.

        The tokenizer of grammars is read beside the weights.
        """
        config, order = self.config, self.order
        share = config.rank_worker.memory_share
        memory_bytes = rank_memory_bytes(self.device, self.ranks_on_host, share)
        split = Split.of(order)
        opened = open_model(config.model, source, split, world, self._report)
        drafter = open_drafter(
            config,
            opened.context_tokens_max,
            activations(opened.model)[1],
            lambda fraction: self._report("loading", fraction),
        )
        needs = drafter.needs if drafter is not None else None
        copies = config.rank_worker.weight_copies
        check_fits(opened.needs, opened.context_tokens_max, memory_bytes, needs, copies=copies)
        grammars = GrammarCompiler(opened.folder, self._report_grammar)
        loaded = opened.read(self._report)
        return loaded, drafter.read() if drafter is not None else None, grammars

    def _compare_ranks(
        self,
        world: Collectives,
        loaded: LoadedModel,
        drafter: LoadedDrafter | None,
        grammars: GrammarCompiler,
    ) -> None:
        """Compare, over all ranks, the settings that decide which collectives run.

        Raises:
            ConfigError: ranks differ; the message, equal on all ranks, says how.
        """
        facts = {
            "lockstep": code_version.build_id(),
            "model (path, dtype, files, versions of mlx and mlx-lm)": loaded.fingerprint,
            "division of the vocabulary": loaded.vocabulary_division,
            "model.context_tokens_max": str(loaded.context_tokens_max),
            "speculation.method": self.config.speculation.method,
            "speculation.draft_model": drafter.fingerprint if drafter is not None else "none",
            "rank_worker.kv_bits": str(self.config.rank_worker.kv_bits),
            "rank_worker.fast_path": self.config.rank_worker.fast_path,
            "rank_worker.peer_memory": str(self.config.rank_worker.peer_memory),
            "rank_worker.prompts_in_place": str(self.config.rank_worker.prompts_in_place),
            "rank_worker.batch_invariant": str(self.config.rank_worker.batch_invariant),
            "grammars (version of llguidance, tokenizer.json)": grammars.fingerprint,
        }
        rows = world.gather(agreement.encode_row(facts))
        if not agreement.rows_intact(rows):
            detail = "sums over ranks are wrong, see the canary"
            _log.warning("settings_not_compared", detail=detail)
            return
        difference = agreement.find_difference(facts, rows)
        if difference is not None:
            raise ConfigError(difference)

    def _build_executor(
        self,
        world: Collectives,
        loaded: LoadedModel,
        tier: StoredTier,
        drafter: LoadedDrafter | None,
        grammars: GrammarCompiler,
    ) -> Executor:
        config, order = self.config, self.order
        self.expert_counter = open_expert_counter(loaded.model, order)
        return Executor(
            loaded.model,
            rank=order.rank,
            world_size=order.world_size,
            synchronization=order.synchronization,
            receipt_logits=order.receipt_logits,
            sum_ids=world.sum_ids if order.world_size > 1 else None,
            forward_cost_tokens=forward_cost_of(order.backend, on_cpu=self._on_cpu),
            kv_bits=config.rank_worker.kv_bits,
            profile=execution_profile(
                self.device,
                order.backend,
                self._free_beside_spare(),
                batch_invariant=config.rank_worker.batch_invariant,
            ),
            take_restored=tier.take,
            drafter=drafter,
            traits=loaded.traits,
            grammars=grammars,
            expert_counter=self.expert_counter,
            fast_path=fast_path_settings(
                config.rank_worker, self.device.kind, order.backend, world
            ),
            vocabulary=loaded.vocabulary,
        )

    def _warm_up(
        self, executor: Executor, loaded: LoadedModel, canary: Canary, world: Collectives
    ) -> None:
        """Run the warm-up and the prompt of the canary, and time a prefill on a GPU."""
        tokens_max = loaded.context_tokens_max
        warm_up(executor, tokens_max, speculates=self.config.speculation.method != "off")
        # rank_worker.kv_bytes_max may exceed the free memory.
        row_bytes = min(self._kv_budget_bytes(), self._free_kv_bytes())
        per_token = executor.store.bytes_per_token + executor.proposer.bytes_per_token
        row_tokens_max = max(0, row_bytes - executor.kv_bytes_per_row) // max(1, per_token)
        canary.check_prompt(executor, tokens_max, row_tokens_max, on_cpu=self._on_cpu)
        # A CPU needs no preparation for a new length, and the prompts would take long.
        longest = 0 if self._on_cpu else min(tokens_max - 1, row_tokens_max)
        self.prefill_time = time_prefill(executor, self.clock, longest, world.all_agree)

    def _kv_budget_bytes(self) -> int:
        """Return the memory that KV may use on this rank, in bytes."""
        # Before a spare process takes its place, the process before it uses the memory.
        ordered = self.order.kv_budget_bytes or self.config.rank_worker.kv_bytes_max
        return ordered or self._free_kv_bytes()

    def _free_kv_bytes(self) -> int:
        """Return the part of the free memory that KV may use, in bytes, beside a loaded spare."""
        return int(KV_MEMORY_SHARE * self._free_beside_spare())

    def _free_beside_spare(self) -> int:
        """Return the free memory without what a loaded spare process of this rank needs."""
        copies = 0 if self.order.kv_budget_bytes else self.config.rank_worker.weight_copies - 1
        return max(0, self._free_bytes() - copies * hardware.used_bytes())

    def _free_bytes(self) -> int:
        """Return the memory that is free now for this rank, in bytes."""
        share = self.config.rank_worker.memory_share
        return hardware.free_bytes(self.device, self.ranks_on_host, share)

    def _ready_message(
        self,
        loaded: LoadedModel,
        drafter: LoadedDrafter | None,
        executor: Executor,
        canary: Canary,
        budget: int,
    ) -> RankReady:
        fingerprints = (loaded.fingerprint, *([drafter.fingerprint] if drafter is not None else []))
        store = executor.store
        return RankReady(
            rank=self.order.rank,
            model_fingerprint="+".join(fingerprints),
            kv_bytes_per_token=store.bytes_per_token,
            kv_bytes_per_row=executor.kv_bytes_per_row,
            kv_budget_bytes=budget,
            context_tokens_max=loaded.context_tokens_max,
            vocab_size=executor.vocab_size,
            can_roll_back=store.can_roll_back,
            needs_checkpoints=store.needs_state,
            kv_layout=store.layout_text if self.config.cache.enabled else "",
            draft_method=drafter.method if drafter else self.config.speculation.method,
            batch_invariant=self.config.rank_worker.batch_invariant,
            prefill_tokens=self.prefill_time.tokens,
            prefill_ms=self.prefill_time.milliseconds,
            draft_bytes_per_token=executor.proposer.bytes_per_token,
            shard_bytes=loaded.shard_bytes,
            share=loaded.share,
            layers=executor.layers_state,
            canary=canary.findings,
            blas=self.blas,
        )

    def _run_steps(
        self, executor: Executor, tier: StoredTier, on_first_step: Callable[[], None] | None
    ) -> NoReturn:
        # All objects so far live as long as the process; later garbage collections skip them.
        gc.collect()
        gc.freeze()
        step_watchdog = Watchdog(self.clock)
        step_watchdog.start()
        measurements = StepMeasurements(
            self.order.epoch, self.order.rank, self.expert_counter, executor.vocabulary
        )
        self.link.take_measurements = measurements.take
        StepLoop(
            self.order,
            executor,
            self.link,
            tier,
            step_watchdog,
            self.clock,
            measurements,
            on_cpu=self._on_cpu,
            on_first_step=on_first_step,
        ).run()
